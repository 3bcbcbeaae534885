"""The demo model: weights of a small model and of its draft head, which are part of the package.

`notebooks/demo_model` trains them.
"""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).with_name("weights")


def demo_path() -> str | None:
    """Return the folder of the demo model, or None if the package was built without it."""
    return str(WEIGHTS) if (WEIGHTS / "config.json").is_file() else None
