"""Low-rank additions in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import address, contiguous_tokens
from ops.cpp.structures import AddLowRank
from ops.low_rank import LowRank

KERNEL, WIDE_KERNEL = "add_low_rank", "add_low_rank_wide"  # the wide kernel adds to float32
KERNELS = frozenset({KERNEL, WIDE_KERNEL})  # a graph without them computes the model without adapters


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.low_rank`."""

    def add_low_rank(y: Tensor, x: Tensor, weights: LowRank, slots: Tensor) -> Tensor:
        """Add `B (A x)` to y in place, with A and B from each token's slot."""
        x = contiguous_tokens(x)
        num_slots, parts, rank, size = weights.a.shape
        shrunk = launcher.empty((len(x), parts * rank), torch.float32)
        operands = AddLowRank(
            x=address(x),
            y=address(y),
            slots=address(slots),
            a=address(weights.a),
            b=address(weights.b),
            ranks=address(weights.ranks),
            ends=address(weights.ends),
            shrunk=address(shrunk),
            tokens=launcher.tokens(x),
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            size=size,
            out_size=y.shape[1],
            num_slots=num_slots,
            parts=parts,
            rank=rank,
        )
        launcher.launch(KERNEL if y.dtype == x.dtype else WIDE_KERNEL, x.dtype, operands)
        return y

    return {"add_low_rank": add_low_rank}
