"""LoRA adapters of a linear layer. Each row of the batch may use a different adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.low_rank import LowRank
from ops.select import Kernels
from runtime.batch import ADAPTER
from runtime.layers.forward_batch import ForwardBatch


class AdapterPart(NamedTuple):
    """The weights of one adapter for one linear layer: this rank's shard, in the model's dtype."""

    a: Tensor  # [P, r, I]; zeros for sub-layers that the adapter does not change
    b: Tensor  # [r, O]; contains the adapter's scale
    # DoRA's scales, float32 [O]. The layer's output without bias is multiplied by them, and then the low-rank product
    # is added. `b` already contains the scales.
    scales: Tensor | None = None


class LowRankSlots:
    """Buffers of one linear layer for the adapters in `num_slots` slots, each of a rank up to `max_rank`."""

    def __init__(
        self,
        sizes: Sequence[int],
        in_size: int,
        num_slots: int,
        max_rank: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`sizes` are the output sizes of the layer's P sub-layers and `in_size` is its input size, on this rank."""
        self.kernels = kernels
        self._scales: dict[int, Tensor] = {}  # by slot
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
        self.weights = LowRank(
            a=torch.zeros(num_slots, len(sizes), max_rank, in_size, dtype=dtype, device=device),
            b=torch.zeros(num_slots, max_rank, int(ends[-1]), dtype=dtype, device=device),
            ranks=torch.zeros(num_slots, dtype=torch.int32, device=device),
            ends=ends.to(device),
        )

    def place(self, slot: int, part: AdapterPart | None) -> None:
        """Copy an adapter's weights into a slot; slots count from 1. None: the adapter does not change this layer."""
        a, b, ranks, _ = self.weights
        rank = 0
        self._scales.pop(slot, None)
        if part is not None:
            rank = part.b.shape[0]
            a[slot - 1, :, :rank].copy_(part.a, non_blocking=True)
            b[slot - 1, :rank].copy_(part.b, non_blocking=True)
            if part.scales is not None:
                self._scales[slot] = part.scales.to(b.device, non_blocking=True)
        ranks[slot - 1] = rank

    def add(self, y: Tensor, x: Tensor, bias: Tensor | None, batch: ForwardBatch) -> None:
        """Add the adapters' products of x [T, I] to the layer's output y [T, O] in place. y contains the bias."""
        for slot, tokens in batch.adapted.items():
            scales = self._scales.get(slot)
            if scales is not None:
                shift = 0.0 if bias is None else bias.float()
                y[tokens] = ((y[tokens].float() - shift) * scales + shift).to(y.dtype)
        slots = batch.values_of_tokens(ADAPTER)
        if slots is not None:
            self.kernels.add_low_rank(y, x, self.weights, slots)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.weights)
