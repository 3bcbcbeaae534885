"""Mixtures of experts in torch, expert by expert. On a GPU the host waits for the number of tokens of each expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation.native import gate
from ops.matmul import nvfp4
from ops.moe import GroupedMixture, Grouping, Mixture


def route(
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    grouping: Grouping | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    choice = logits = logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    if bias is not None or grouping is not None:
        choice = scores if bias is None else scores + bias
    if grouping is not None:
        choice = _of_best_groups(choice, grouping)
    # torch's topk does not define the order of equal values.
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts.int()


def _of_best_groups(choice: Tensor, grouping: Grouping) -> Tensor:
    """Return `choice` [T, X] with -inf for experts outside the best groups."""
    groups = choice.unflatten(-1, (grouping.num_groups, -1))  # [T, G, X / G]
    totals = groups.topk(grouping.num_scores, dim=-1).values.sum(-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : grouping.top_groups]
    excluded = torch.ones_like(totals, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)


def prepare_experts(mixture: Mixture, *, bits: int | None = None) -> Mixture:
    """Return the weights unchanged (see `ops.moe`)."""
    return mixture


def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return the dequantised weights (see `ops.moe`)."""
    gate_up, down, *biases = mixture
    weights = [
        torch.stack([weight.expert(number).dequantised().to(dtype) for number in range(len(weight.codes))])
        for weight in (gate_up, down)
    ]
    return Mixture(*weights, *biases)


def one_expert(mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the weights of one expert (see `ops.moe`)."""
    return Mixture(*(None if each is None else each[expert : expert + 1] for each in mixture))  # pyright: ignore[reportArgumentType]


def mix(
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    *,
    weigh_inputs: bool = False,
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias = mixture
    top_k, (num_experts, size, _) = experts.shape[1], down.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # (token, expert) pairs, sorted by expert
    first, *counts = torch.bincount(chosen + 1, minlength=num_experts + 1).tolist()  # expert -1 comes first
    results = x.new_zeros(len(chosen), size) if first else x.new_empty(len(chosen), size)
    for expert, count in enumerate(counts):
        if count:
            pairs = order[first : first + count]
            bias, out_bias = (None if each is None else each[expert] for each in (gate_up_bias, down_bias))
            rows = x.index_select(0, pairs // top_k)
            if weigh_inputs:
                rows = (rows.float() * weights.flatten()[pairs].unsqueeze(1)).to(x.dtype)
            inner = gate(F.linear(rows, gate_up[expert], bias), activation)
            results.index_copy_(0, pairs, F.linear(inner, down[expert], out_bias))
        first += count
    outputs = results.view(-1, top_k, size).float()
    return (outputs if weigh_inputs else outputs * weights.unsqueeze(2)).sum(1).to(x.dtype)


def mix_rounded(x: Tensor, mixture: GroupedMixture, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the output of experts with silu in NVFP4 whose inputs are rounded: the reference for fused kernels.

    The inputs of the first product are rounded with the largest factor of all experts, and those of the second with
    each expert's own (`ops/matmul/nvfp4.py`). Products and activations are in float32.
    """
    shared, total = nvfp4.input_factor(mixture.gate_up), x.new_zeros(x.shape, dtype=torch.float32)
    for number in range(len(mixture.down.codes)):
        tokens, places = (experts == number).nonzero(as_tuple=True)
        first, second = (each.expert(number) for each in mixture[:2])
        inner = nvfp4.linear(x[tokens].float(), first._replace(input_scales=shared))
        result = nvfp4.linear(gate(inner, "silu"), second)
        total.index_add_(0, tokens, result * weights[tokens, places].unsqueeze(1))
    return total.to(x.dtype)
