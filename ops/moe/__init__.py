"""Mixtures of experts: each token is computed by a few of X gated feed-forward networks.

A backend file holds

    route(logits [T, X], top_k, *, renormalise, scoring="softmax", bias [X] | None = None, grouping=None, scale=1.0)
        -> (weights float32 [T, k], experts int32 [T, k])
    mix(x [T, E], mixture, weights, experts, activation, *, weigh_inputs=False) -> [T, E]
    prepare_experts(mixture, *, bits=None) -> mixture
    prepare_grouped_experts(mixture: GroupedMixture, dtype) -> mixture

`route` gives each token the `top_k` experts of the largest logits, equal ones by lower number, the best first. Their
weights are their scores, in float32: the softmax over all X logits, or with scoring="sigmoid" each logit's own
sigmoid; with `renormalise` divided by their sum; then times `scale`. Source: arXiv 1701.06538. With a `bias` (float32)
or a `grouping` experts are chosen by score + bias, and only from the best groups (`Grouping`; arXiv 2412.19437).

`mix` is the sum over a token's experts of weight * down(activation(gate) * up): the rows 0 .. F - 1 of an expert's
`gate_up` give the gate, the others what it is multiplied by. Products are rounded to x's dtype, the weighted sum is
taken in float32 and rounded once. With `weigh_inputs` it is their sum over down(activation(gate) * up) of weight * x,
which is rounded (Llama 4). `activation` is one of `ops.activation.ACTIVATIONS`. `prepare_experts` is called once
for complete weights, as `ops.matmul` prepares its own; a backend that has nothing to gain, or that cannot round to so
many bits, returns them as they are. `prepare_grouped_experts` is the same for weights of 4 bits and products in
`dtype`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ops.matmul.grouped import GroupedWeight

SCORINGS = ("softmax", "sigmoid")


class Mixture(NamedTuple):
    """The weights of all experts."""

    gate_up: Tensor  # [X, 2F, E]
    down: Tensor  # [X, E, F]
    gate_up_bias: Tensor | None = None  # [X, 2F]
    down_bias: Tensor | None = None  # [X, E]


class GroupedMixture(NamedTuple):
    """The same of 4 bits, before a backend packs it."""

    gate_up: GroupedWeight
    down: GroupedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Grouping(NamedTuple):
    """Experts are chosen from the best of some groups of neighbours."""

    num_groups: int
    top_groups: int  # how many are the best
    num_scores: int  # a group's score is the sum of so many of its best ones
