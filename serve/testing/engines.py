"""Engines for tests: the demo model, a small KV cache and a fixed seed."""

from __future__ import annotations

from typing import Any

from serve.python.engine import Engine
from serve.python.sync_engine import SyncEngine

SMALL = {"max_total_tokens": 8192, "random_seed": 0}


def engine(model_path: str | None = None, **options: Any) -> Engine:
    """Return an engine with a small KV cache and a fixed seed. Start it with `async with engine() as e`."""
    return Engine(model_path, **{**SMALL, **options})


def sync_engine(model_path: str | None = None, **options: Any) -> SyncEngine:
    """Return a `SyncEngine` with a small KV cache and a fixed seed. The first call starts it."""
    return SyncEngine(model_path, **{**SMALL, **options})
