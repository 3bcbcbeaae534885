"""Penstock: a language-model serving engine in one asyncio process.

from serve import Engine

async with Engine(model_path="...") as engine:
    print((await engine.generate("Hello"))["text"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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
    """Engines are imported when they are first asked for: the command line's help needs none."""
    if name in ("Engine", "SyncEngine"):
        from serve import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'serve' has no attribute '{name}'")
