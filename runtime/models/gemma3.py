"""Gemma 3, its text part: Gemma 2 with q and k normalised per head, and angles of their own where there is a window."""

from __future__ import annotations

from typing import Any

from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.gemma2 import sandwiched
from runtime.models.qwen3 import head_norms


def decoder(config: Config, build: Build) -> Decoder:
    """Every sixth layer looks at all positions, the others at the last `sliding_window`."""
    kinds = config.layer_types() or []

    def options(index: int) -> dict[str, Any]:
        qk_norm = head_norms(config, index, build, unit_offset=True)
        return {"qk_norm": qk_norm, "rope": build.rope(config.rope(kinds[index]))}

    return sandwiched(config, build, kinds, options)
