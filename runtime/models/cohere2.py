"""Command R7B, Command A and Aya of 2024 on (Cohere 2): windows with rotation, and layers with neither."""

from __future__ import annotations

from typing import Any

from runtime.layers.build import Build
from runtime.models.cohere import beside
from runtime.models.config import Config
from runtime.models.decoder import Decoder


def decoder(config: Config, build: Build) -> Decoder:
    """Layers without a window do not rotate."""
    kinds, window = config.layer_types() or [], config.optional_integer("sliding_window")

    def options(index: int) -> dict[str, Any]:
        if window is not None and kinds[index] == "sliding_attention":
            return {"window": window}
        return {"rope": None}

    return beside(config, build, options)
