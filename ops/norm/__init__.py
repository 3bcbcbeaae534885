"""Normalisation of vectors, alone or fused with the residual addition before it.

A backend file defines

    rms_norm(x [..., E], weight [E], eps, *, unit_offset=False) -> [..., E]
    add_rms_norm(x [T, E], residual [T, E], weight [E], eps, *, unit_offset=False) -> (normed, x + residual)

`rms_norm` returns x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once to x's dtype.
`add_rms_norm` normalises x + residual instead of x. With `unit_offset` the factor is 1 + weight instead of weight.
Source: arXiv 1910.07467.

    layer_norm(x [..., E], weight [E], bias [E] | None, eps) -> [..., E]
    add_layer_norm(x [T, E], residual [T, E], weight [E], bias [E] | None, eps) -> (normed, x + residual)

These two operations first subtract mean(x) from x, and add `bias` at the end. Source: arXiv 1607.06450.

A weight [H, D] normalises each of H vectors with D elements (for example heads) with its own weight.

    add(x [T, E], y [T, E], *, scale=1.0, gate [T, 1] | None = None) -> y + x * scale * sigmoid(gate)

    add_rms_norm_round(x, residual, weight, eps, group, *, unit_offset=False) -> (RoundedRows, x + residual)

This operation computes `add_rms_norm`, and also rounds the normalised values to float8 for a product that takes float8
rows (`RoundedRows` in `ops/matmul/rounded_rows.py`). Each `group` elements have one scale; `group` is E or a power of
two that divides E.

`add_rms_norm`, `add_layer_norm` and `add` may overwrite their inputs; use the returned tensors.
"""
