"""Decode steps with a forward pass that torch.compile has compiled."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.rope.composed import compose
from ops.select import Kernels
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder
from runtime.worker.device import Device
from runtime.worker.step_inputs import scratch_inputs

logger = logging.getLogger("penstock.core")

OPAQUE = ("attend", "store", "convolve", "delta_rule", "scan")  # kernels that read or write caches
# Upper bound on the compiled versions of a layer's code: for one and several rows, with and without optional inputs.
VERSIONS_PER_LAYER = 8


def compilable(kernels: Kernels) -> Kernels:
    """Return kernels for a model that torch.compile compiles.

    torch.compile calls the `OPAQUE` kernels, which use caches, without compiling them.
    """
    opaque: dict[str, Any] = {
        name: torch.compiler.disable(getattr(kernels, name), reason="reads or writes a cache") for name in OPAQUE
    }
    fused = compose(kernels.rms_norm, kernels.rotate, opaque["store"], kernels.join)
    return replace(kernels, **opaque, **fused)


class CompiledForward:
    """Runs the compiled forward pass for batches of up to `max_rows` one-token rows. Other batches run eagerly.

    The model's kernels must be `compilable`. `compile` compiles two versions: for one row, and for several rows. This
    may take minutes.
    """

    def __init__(self, model: Decoder, cache: KVPool, max_rows: int) -> None:
        self._model = model
        self._cache = cache
        self._max_rows = max_rows
        self._compiled = torch.compile(model.forward, dynamic=True)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        counts = batch.attention.counts_host
        single = batch.is_plain and len(counts) <= self._max_rows and all(count == 1 for count in counts)
        return self._compiled(batch) if single else self._model(batch)

    def compile(self, device: Device) -> None:
        """Compile now, by running padding rows that use only scratch units. Blocks."""
        # Here, because it takes more than a second, and loads Triton if it is installed.
        from torch._dynamo import config

        logger.info("Compiling the forward with torch.compile, which may take minutes.")
        began = time.perf_counter()
        cache, limit = self._cache, VERSIONS_PER_LAYER * max(1, len(self._model.layers))
        # The code between two attention calls reads the layer's index, so it is compiled once per layer. With torch's
        # default limit of eight versions, all layers after the eighth would run eagerly.
        limits = config.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit)
        with limits, torch.inference_mode(), device.forward():
            for num_rows in range(1, min(2, self._max_rows) + 1):
                zeros = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
                attention = AttentionMetadata.build(
                    [0] * num_rows,
                    [1] * num_rows,
                    np.full((num_rows, 1), cache.scratch_page, np.int32),
                    cache.page_size,
                    device.torch_device,
                )
                kinds = {name: scratch_inputs(name, count, num_rows, attention) for name, count in cache.kinds.items()}
                self._compiled(
                    ForwardBatch(token_ids=zeros, positions=zeros, attention=attention, cache=cache, kinds=kinds)
                )
        logger.info("Compiled the forward in %.1f s.", time.perf_counter() - began)
