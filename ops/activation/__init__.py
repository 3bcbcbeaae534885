"""Activations and gated activations.

A backend file defines

    gate(x [..., 2F], activation) -> [..., F]                    activation(first half) * second half
    activate(x [..., F], activation) -> [..., F]                 activation(x)
    modulate(x [T, F], gate [T, F], activation) -> [T, F]        x * activation(gate)

    gate_round(x [T, 2F], activation, group) -> RoundedRows [T, F]

`gate_round` is `gate` for a product that rounds its rows to float8 with one scale per `group` elements: `group` is F or
a power of two that divides F. See `ops/matmul/rounded_rows.py`.

`activation` is one of `ACTIVATIONS`; for `modulate`, "silu" or "sigmoid". `activate` may overwrite x, so its caller
must not read x afterwards. `modulate` computes in float32 and rounds once.

"relu2" is the square of relu. "clamped_swiglu" is the activation of gpt-oss, for `gate` only: with gates g clamped to
at most 7 and values v clamped to -7 .. 7, it is g * sigmoid(1.702 g) * (v + 1).
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
