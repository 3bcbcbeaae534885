"""Root mean square normalisation, alone or fused with the residual addition before it.

A backend file holds

    rms_norm(x [..., E], weight [E], eps, *, unit_offset=False) -> [..., E]
    add_rms_norm(x [T, E], residual [T, E], weight [E], eps, *, unit_offset=False) -> (normed, x + residual)

x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once to x's dtype; with `unit_offset` the
factor is 1 + weight. The inputs of `add_rms_norm` may be overwritten: use what it returns.
"""
