"""Sampling in C++ (`ops/cpp/source/sampling.h`): greedy rows, and other rows that have no limit or only min_p.

The kernel that chooses a row's token also applies the row's mask, while the row is in the core's cache. It skips blocks
of 256 tokens that contain no allowed token. A second kernel computes log-probabilities: it sums the softmax's
denominator without storing the softmax, and ranks only the top tokens. torch computes penalties, and rows with other
limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address
from ops.cpp.structures import Draw, Score
from ops.sampling import Masks, SamplingArrays, Scores, native
from ops.sampling.fallback import native_for_other_limits

MAX_TOP = 128  # maximum number of best tokens that the kernel ranks; `sampling.h` has the same constant
READ = ("greedy", "temperature", "min_p", "uniform")  # fields of `SamplingArrays` that the kernel reads


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.sampling`, for logits on the host."""

    @native_for_other_limits({"min_p"})
    def choose(
        logits: Tensor,
        arrays: SamplingArrays,
        host: SamplingArrays | None = None,
        masks: Masks | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits.shape
        if not logits.is_contiguous():
            return native.choose(logits, arrays, host, masks)
        ids, sound = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        per_row = {name: getattr(arrays, name).contiguous() for name in READ}
        mask_of = bits = None
        if masks is not None:
            bits = masks.bitmask.contiguous()
            mask_of = np.full(num_rows, -1)
            mask_of[masks.rows.numpy()] = np.arange(len(bits))
        operands = Draw(
            logits=address(logits),
            **{name: address(tensor) for name, tensor in per_row.items()},
            ids=address(ids),
            sound=address(sound),
            mask_of=None if mask_of is None else mask_of.ctypes.data,
            masks=address(bits),
            words=0 if bits is None else bits.shape[1],
            rows=num_rows,
            vocab_size=vocab_size,
        )
        launcher.launch("draw", torch.float32, operands)
        return ids, sound

    def score(logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor) -> Scores:
        num_rows, vocab_size = logits.shape
        num_top, num_requested = min(num_top, vocab_size), requested_ids.shape[1]
        if num_top > MAX_TOP or not logits.is_contiguous():
            return native.score(logits, temperature, chosen_ids, num_top, requested_ids)
        temperature, chosen_ids = temperature.contiguous(), chosen_ids.contiguous()
        requested_ids = requested_ids.contiguous()
        scores = Scores(
            torch.empty(num_rows),
            torch.empty(num_rows, num_top),
            torch.empty(num_rows, num_top, dtype=torch.int64),
            torch.empty(num_rows, num_requested),
        )
        operands = Score(
            logits=address(logits),
            temperature=address(temperature),
            chosen_ids=address(chosen_ids),
            requested_ids=address(requested_ids),
            **{name: address(tensor) for name, tensor in scores._asdict().items()},
            rows=num_rows,
            vocab_size=vocab_size,
            num_top=num_top,
            num_requested=num_requested,
        )
        launcher.launch("score", torch.float32, operands)
        return scores

    return {"choose": choose, "penalize": native.penalize, "score": score}
