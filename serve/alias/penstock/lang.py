"""`serve.lang` under Penstock's name: `import penstock.lang as sgl`."""

from serve.lang import *  # noqa: F403
from serve.lang import __all__ as __all__
