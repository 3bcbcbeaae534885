"""Penstock: a language-model serving engine in one asyncio process.

from serve import Engine

async with Engine(model_path="...") as engine:
    print((await engine.generate("Hello"))["text"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serve.guard import check_packages

if TYPE_CHECKING:
    from runtime.errors import (
        CheckpointError,
        ConfigurationError,
        EngineClosed,
        EngineFailure,
        InvalidRequest,
        Overloaded,
        PenstockError,
        RequestError,
    )
    from serve.engine import Engine, SyncEngine

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "Engine",
    "EngineClosed",
    "EngineFailure",
    "InvalidRequest",
    "Overloaded",
    "PenstockError",
    "RequestError",
    "SyncEngine",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first asked for: the command line's help needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'serve' has no attribute '{name}'")
    check_packages()  # before anything is imported from a package that may be somebody else's
    home = "serve.engine" if name in ("Engine", "SyncEngine") else "runtime.errors"
    return getattr(import_module(home), name)
