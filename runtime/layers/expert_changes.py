"""LoRA adapters of experts, computed in PyTorch: the adapter is merged into each expert that its tokens have chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.moe import Mixture
from ops.moe.native import mix
from ops.select import Kernels


class ExpertPair(NamedTuple):
    """Low-rank changes of one weight of all experts: the weight W of expert x becomes W + b[x] @ a[x]."""

    a: Tensor  # [X, r, I]; zeros for experts that the adapter does not change
    b: Tensor  # [X, O, r]; contains the adapter's scale

    def added_to(self, weight: Tensor, expert: int) -> Tensor:
        """Return the expert's weight [O, I] with the change."""
        return (weight.float() + self.b[expert].float() @ self.a[expert].float()).to(weight.dtype)


class ExpertChange(NamedTuple):
    """This rank's shard of one adapter's changes of the experts of one layer. None: the weight does not change."""

    gate: ExpertPair | None
    up: ExpertPair | None
    down: ExpertPair | None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> ExpertChange:
        """Copy to a device, and to a dtype."""

        def copied(pair: ExpertPair | None) -> ExpertPair | None:
            return pair and ExpertPair(*(half.to(device, dtype or half.dtype, non_blocking=True) for half in pair))

        return ExpertChange(*map(copied, self))

    def added_to(self, one: Mixture) -> Mixture:
        """Return the single-expert mixture `one` with the changes at index 0 of each pair."""
        gate, up = one.gate_up[0].chunk(2)
        gate, up, down = (
            weight if pair is None else pair.added_to(weight, 0)
            for pair, weight in zip(self, (gate, up, one.down[0]), strict=True)
        )
        return one._replace(gate_up=torch.cat([gate, up]).unsqueeze(0), down=down.unsqueeze(0))

    def of_expert(self, expert: int) -> ExpertChange:
        """Return the changes of one expert, at index 0 of each pair."""
        part = slice(expert, expert + 1)
        return ExpertChange(*(each and ExpertPair(each.a[part], each.b[part]) for each in self))


def mix_changed(
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    change: ExpertChange,
    kernels: Kernels,
    *,
    numbers: Sequence[int],
    inner_size: int,
    weigh_inputs: bool,
) -> Tensor:
    """Return the result of `Kernels.mix` with the adapter's changes, for tokens x [n, E] that use this adapter.

    `numbers` maps the index of an expert in `mixture` to its index in the whole layer. Waits for the device.
    """
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(experts[experts >= 0]).tolist():
        tokens, place = torch.nonzero(experts == expert, as_tuple=True)
        one = kernels.one_expert(mixture, expert, x.shape[1], inner_size)
        one = one._replace(gate_up=one.gate_up.to(x.dtype), down=one.down.to(x.dtype))
        changed = change.of_expert(numbers[expert]).added_to(one)
        of_expert = weights[tokens, place].unsqueeze(1)
        first = torch.zeros_like(of_expert, dtype=torch.int32)
        mixed[tokens] += mix(x[tokens], changed, of_expert, first, activation, weigh_inputs=weigh_inputs).float()
    return mixed.to(x.dtype)
