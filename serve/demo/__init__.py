"""The embedded demo model: weights in `weights/`, the recipe that makes them in `recipe/`."""

from pathlib import Path

WEIGHTS = Path(__file__).with_name("weights")
