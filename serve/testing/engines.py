"""Engines for tests: small, on the demo model, and deterministic."""

from __future__ import annotations

from typing import Any

from serve.python.engine import Engine
from serve.python.sync_engine import SyncEngine

SMALL = {"max_total_tokens": 8192, "random_seed": 0}


def engine(model_path: str | None = None, **options: Any) -> Engine:
    """Return an engine with a small cache and a fixed seed. Start it with `async with engine() as e`."""
    return Engine(model_path, **{**SMALL, **options})


def sync_engine(model_path: str | None = None, **options: Any) -> SyncEngine:
    """Return the same engine for code without `await`. It starts with the first call."""
    return SyncEngine(model_path, **{**SMALL, **options})
