"""Penstock under its own name: `from penstock import Engine, SyncEngine, LLM, SamplingParams`.

Everything is that of the package `serve`, where the code is; `penstock.lang` is `serve.lang`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import serve

if TYPE_CHECKING:
    from serve import *  # noqa: F403

__version__ = serve.__version__
__all__ = [*serve.__all__]  # pyright: ignore[reportUnsupportedDunderAll]
MODULES = ("lang", "testing")


def __getattr__(name: str) -> Any:
    """Return a public name of `serve`; it is imported when it is first used."""
    if name in MODULES:
        return import_module(f"serve.{name}")
    try:
        return getattr(serve, name)
    except AttributeError:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES})
