"""Says so clearly when `runtime` or `ops` are not ours: these names are used by other projects too."""

from __future__ import annotations

from importlib import util
from pathlib import Path


class WrongPackageError(ImportError):
    """A package of ours is missing, or somebody else's with the same name is found first."""


def check_packages(names: tuple[str, ...] = ("runtime", "ops"), marker: str = "__init__.py") -> None:
    """Raise `WrongPackageError` unless the named packages lie beside this one. Imports nothing."""
    beside = Path(__file__).resolve().parent.parent
    for name in names:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise WrongPackageError(f"The package '{name}' of Penstock is missing; install Penstock again.")
        if Path(spec.origin).resolve() != beside / name / marker:
            raise WrongPackageError(
                f"The package '{name}' is not Penstock's: Python finds {spec.origin} first. Use a virtual "
                f"environment without the other '{name}', or start from another folder."
            )
