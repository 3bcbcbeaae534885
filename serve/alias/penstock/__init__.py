"""Penstock under its own name: `from penstock import Engine, SyncEngine, LLM, SamplingParams`.

All names come from the package `serve`, which contains the code. `penstock.lang` is `serve.lang`,
and `penstock.vllm` is `serve.vllm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import serve

if TYPE_CHECKING:
    from serve import *  # noqa: F403

__version__ = serve.__version__
__all__ = [*serve.__all__]  # pyright: ignore[reportUnsupportedDunderAll]
MODULES = ("lang", "testing", "vllm")


def __getattr__(name: str) -> Any:
    """Import and return a public name of `serve` when it is first used."""
    if name in MODULES:
        return import_module(f"serve.{name}")
    try:
        return getattr(serve, name)
    except AttributeError:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES})
