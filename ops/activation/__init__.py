"""Activations and gated activations.

A backend file defines

    gate(x [..., 2F], activation) -> [..., F]                    activation(first half) * second half
    activate(x [..., F], activation) -> [..., F]                 activation(x)
    modulate(x [T, F], gate [T, F], activation) -> [T, F]        x * activation(gate)

    gate_round(x [T, 2F], activation, group) -> RoundedRows [T, F]

`gate_round` computes `gate`, and also rounds the result to float8 for a product that takes float8 rows. Each `group`
elements have one scale; `group` is F or a power of two that divides F. See `ops/matmul/rounded_rows.py`.

`activation` is one of `ACTIVATIONS`; for `modulate`, "silu" or "sigmoid". `activate` may overwrite x, so its caller
must not read x afterwards. `modulate` computes in float32 and rounds once.

"relu2" is the square of relu. "clamped_swiglu" is the activation of gpt-oss, for `gate` only. It is
g * sigmoid(1.702 g) * (v + 1), with the first half g clamped to at most 7 and the second half v clamped to -7 .. 7.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
