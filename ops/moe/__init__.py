"""Mixtures of experts: each token is computed by a few of X gated feed-forward networks.

A backend file defines

    route(logits [T, X], top_k, *, renormalise, scoring="softmax", bias [X] | None = None, grouping=None, scale=1.0)
        -> (weights float32 [T, k], experts int32 [T, k])
    mix(x [T, E], mixture, weights, experts, activation, *, weigh_inputs=False) -> [T, E]
    prepare_experts(mixture, *, bits=None) -> mixture
    prepare_grouped_experts(mixture: GroupedMixture, dtype) -> mixture
    one_expert(mixture, expert, size, inner_size) -> mixture

`route` selects the `top_k` experts with the largest logits for each token, the best first. Equal logits are ranked by
lower expert number. An expert's score (float32) is its softmax over all X logits or, with scoring="sigmoid", the
sigmoid of its logit. The weights are the scores of the selected experts, divided by their sum if `renormalise`, and
then multiplied by `scale`. Source: arXiv 1701.06538. With a `bias` (float32), the experts with the largest score + bias
are selected. With a `grouping`, experts are selected by score (+ bias), and only from the best groups (`Grouping`;
arXiv 2412.19437).

`mix` returns the sum over a token's experts of weight * down(activation(gate) * up). The rows 0 .. F - 1 of an expert's
`gate_up` are the weight of the gate, and the other rows are the weight of `up`. Products are rounded to x's dtype; the
weighted sum is computed in float32 and rounded once. With `weigh_inputs`, an expert's input is weight * x, rounded, and
the sum is not weighted (Llama 4). `activation` is one of `ops.activation.ACTIVATIONS`. The expert -1 adds nothing: it
marks a pair of a token and an expert that another rank computes.

`prepare_experts` is called once for complete weights, like `prepare` of `ops.matmul`. A backend without a faster
layout, or without kernels for this number of bits, returns the weights unchanged. `prepare_grouped_experts` prepares
grouped weights (`ops/matmul/grouped.py`) for products in `dtype`.

`one_expert` returns the unpacked weights of one expert of a prepared mixture, as a mixture with X = 1. It raises
ValueError if the backend cannot unpack the mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ops.matmul.grouped import GroupedWeight

SCORINGS = ("softmax", "sigmoid")


class Mixture(NamedTuple):
    """Weights of all experts."""

    gate_up: Tensor  # [X, 2F, E]
    down: Tensor  # [X, E, F]
    gate_up_bias: Tensor | None = None  # [X, 2F]
    down_bias: Tensor | None = None  # [X, E]


class GroupedMixture(NamedTuple):
    """Grouped weights of all experts, before a backend packs them."""

    gate_up: GroupedWeight
    down: GroupedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Grouping(NamedTuple):
    """Groups of consecutive experts. Experts are selected only from the best groups."""

    num_groups: int
    top_groups: int  # number of groups from which experts are selected
    num_scores: int  # number of a group's best experts whose scores are added up to the score of the group
