"""Mixtures of experts in plain torch, one after the other. On a GPU it waits to know how many tokens each has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation.native import gate


def route(
    logits: Tensor, top_k: int, *, renormalise: bool, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The best experts of each token and their weights (see `ops.moe`)."""
    logits = logits.float()
    # torch's own top-k leaves the order of equal values open.
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.int()


def mix(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, activation: str
) -> Tensor:
    """The weighted sum of each token's experts (see `ops.moe`)."""
    top_k, (num_experts, size, _) = experts.shape[1], down.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # of (token, expert) pairs, by expert
    results = x.new_empty(len(chosen), size)
    first = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=num_experts).tolist()):
        if count:
            pairs = order[first : first + count]
            inner = gate(F.linear(x.index_select(0, pairs // top_k), gate_up[expert]), activation)
            results.index_copy_(0, pairs, F.linear(inner, down[expert]))
        first += count
    return (results.view(-1, top_k, size).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
