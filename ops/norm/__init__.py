"""Normalisation of vectors, alone or fused with the residual addition before it.

A backend file holds

    rms_norm(x [..., E], weight [E], eps, *, unit_offset=False) -> [..., E]
    add_rms_norm(x [T, E], residual [T, E], weight [E], eps, *, unit_offset=False) -> (normed, x + residual)

x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once to x's dtype; with `unit_offset` the
factor is 1 + weight (arXiv 1910.07467).

    layer_norm(x [..., E], weight [E], bias [E] | None, eps) -> [..., E]
    add_layer_norm(x [T, E], residual [T, E], weight [E], bias [E] | None, eps) -> (normed, x + residual)

the same of x - mean(x), with `bias` added at the end (arXiv 1607.06450). A weight of x's last two dimensions, [H, D],
of either kind, normalises each of the H lines of D with a weight of its own.

    add(x [T, E], y [T, E], *, scale=1.0, gate [T, 1] | None = None) -> y + x * scale * sigmoid(gate)

The inputs of what begins with `add` may be overwritten: use what it returns.
"""
