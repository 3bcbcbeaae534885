"""`serve.testing` under Penstock's name: `from penstock.testing import ...`."""

from serve.testing import *  # noqa: F403
from serve.testing import __all__ as __all__
