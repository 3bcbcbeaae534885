"""Steps of output tokens with layers compiled by torch.compile."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionInputs
from ops.select import Kernels
from runtime.kv_cache.pools import KVPool
from runtime.models.decoder import Decoder
from runtime.worker.device import Device
from runtime.worker.forward import EagerForward
from runtime.worker.forward_batch import StepInputs

logger = logging.getLogger("penstock.core")


def compilable(kernels: Kernels) -> Kernels:
    """These kernels, of which those that read rows' lengths or write the cache are left out of what is compiled."""
    opaque = {
        name: torch.compiler.disable(getattr(kernels, name), reason="reads or writes the paged cache")
        for name in ("attend", "store")
    }
    return replace(kernels, **opaque)


class CompiledForward:
    """Compiled for batches of up to `max_rows` rows of one token, eager for all others.

    The model's kernels must be `compilable`. There is one version for a single row and one for any other
    number; `compile` makes both before a step needs them, which takes up to minutes.
    """

    def __init__(self, model: Decoder, pool: KVPool, max_rows: int) -> None:
        self._eager = EagerForward(model, pool)
        self._pool = pool
        self._max_rows = max_rows
        self._compiled = torch.compile(model.forward, dynamic=True)

    def __call__(self, token_ids: Tensor, inputs: StepInputs) -> Tensor:
        counts = inputs.attention.counts_host
        if len(counts) > self._max_rows or any(count != 1 for count in counts):
            return self._eager(token_ids, inputs)
        return self._compiled(token_ids, inputs.positions, inputs.attention, self._pool)

    def compile(self, device: Device) -> None:
        """Compile now, with rows that touch nothing but the pool's scratch page. Blocks."""
        began = time.perf_counter()
        pool = self._pool
        with torch.inference_mode(), device.forward():
            for num_rows in range(1, min(2, self._max_rows) + 1):
                zeros = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
                inputs = AttentionInputs.build(
                    [0] * num_rows,
                    [1] * num_rows,
                    np.full((num_rows, 1), pool.scratch_page, np.int32),
                    pool.page_size,
                    device.torch_device,
                )
                self._compiled(zeros, zeros, inputs, pool)
        logger.info("Compiled the layers in %.1f s.", time.perf_counter() - began)
