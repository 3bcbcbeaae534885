"""Mixtures of experts: each token is computed by a few of X gated feed-forward networks.

A backend file holds

    route(logits [T, X], top_k, *, renormalise, scoring="softmax") -> (weights float32 [T, k], experts int32 [T, k])
    mix(x [T, E], gate_up [X, 2F, E], down [X, E, F], weights, experts, activation) -> [T, E]

`route` gives each token the `top_k` experts of the largest logits, equal ones by lower number, the best first. Their
weights are their scores, in float32: the softmax over all X logits, or with scoring="sigmoid" each logit's own
sigmoid; with `renormalise` divided by their sum. Source: arXiv 1701.06538.

`mix` is the sum over a token's experts of weight * down(activation(gate) * up): the rows 0 .. F - 1 of an expert's
`gate_up` give the gate, the others what it is multiplied by. Products are rounded to x's dtype, the weighted sum is
taken in float32 and rounded once. `activation` is one of `ops.activation.ACTIVATIONS`.
"""

SCORINGS = ("softmax", "sigmoid")
