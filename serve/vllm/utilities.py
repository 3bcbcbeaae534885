"""Small functions and names that vLLM's examples import."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

VllmConfig = Any  # the type of an argument of logits processors, which is always None here
init_logger = logging.getLogger


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Run Python's garbage collector, which ends engines without references. `shutdown_ray` has no effect."""
    gc.collect()


def print_embeddings(values: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first 16 numbers of an embedding, and its size."""
    shown = ", ".join(f"{value:.4g}" for value in values[:16])
    print(f"{prefix}: [{shown}{', ...' if len(values) > 16 else ''}] (size={len(values)})")
