"""Decode steps whose forward pass is compiled by torch.compile."""

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
VERSIONS_PER_LAYER = 8  # upper bound on the versions of a layer's code: one and several rows, with and without inputs


def compilable(kernels: Kernels) -> Kernels:
    """Return kernels for torch.compile. It does not compile the `OPAQUE` ones, which use caches."""
    opaque: dict[str, Any] = {
        name: torch.compiler.disable(getattr(kernels, name), reason="reads or writes a cache") for name in OPAQUE
    }
    fused = compose(kernels.rms_norm, kernels.rotate, opaque["store"])
    return replace(kernels, **opaque, **fused)


class CompiledForward:
    """Runs a compiled forward pass for up to `max_rows` rows of one token, and the eager one for other batches.

    The model's kernels must be `compilable`. `compile` compiles two versions, for one row and for several rows. This
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
        """Compile now, with padding rows that use only scratch units. Blocks."""
        from torch._dynamo import config  # takes more than a second, and loads Triton if it is installed

        logger.info("Compiling the forward with torch.compile, which may take minutes.")
        began = time.perf_counter()
        cache, limit = self._cache, VERSIONS_PER_LAYER * max(1, len(self._model.layers))
        # The code between two attention calls is compiled once per layer, whose index it reads. With torch's default
        # limit of eight versions, the ninth layer and all later ones would run eagerly.
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
