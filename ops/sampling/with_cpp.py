"""Choosing tokens in C++ (`ops/cpp/source/sampling.h`): greedily, or by temperature and min_p from all tokens.

Masks are applied by the same kernel, row by row: a masked row is in the core's cache then, and where its mask allows no
token of 256 nothing is worked out.

Rows limited by top_k or top_p, penalties and log-probabilities are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address
from ops.cpp.structures import Draw
from ops.sampling import Masks, SamplingArrays, native


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """All of `ops.sampling`, for logits on the host."""

    def choose(
        logits: Tensor,
        arrays: SamplingArrays,
        host: SamplingArrays | None = None,
        masks: Masks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Which kernel a row goes to depends on that row alone, as its result does."""
        num_rows, vocab_size = logits.shape
        greedy, top_k, top_p = (field.numpy() for field in (arrays.greedy, arrays.top_k, arrays.top_p))
        limited = ((top_k < vocab_size) | (top_p < 1)) & ~greedy
        if not logits.is_contiguous() or bool(limited.all()):
            return native.choose(logits, arrays, host, masks)
        ids, sound = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        given = [arrays.greedy, arrays.temperature, arrays.min_p, arrays.uniform]
        given = [tensor.contiguous() for tensor in given]
        addresses = (address(tensor) for tensor in (*given, ids, sound))
        mask_of = bits = None
        if masks is not None:
            bits = masks.bitmask.contiguous()
            mask_of = np.full(num_rows, -1)
            mask_of[masks.rows.numpy()] = np.arange(len(bits))
        operands = Draw(
            address(logits),
            limited.ctypes.data,
            *addresses,
            None if mask_of is None else mask_of.ctypes.data,
            address(bits),
            0 if bits is None else bits.shape[1],
            num_rows,
            vocab_size,
        )
        launcher.launch("draw", torch.float32, operands)
        if limited.any():
            rows = torch.from_numpy(np.flatnonzero(limited))
            taken = SamplingArrays(*(field[rows] for field in arrays))
            ids[rows], sound[rows] = native.choose(logits[rows], taken)
        return ids, sound

    return {"choose": choose, "penalize": native.penalize, "score": native.score}
