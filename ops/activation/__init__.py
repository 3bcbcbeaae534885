"""Activations, alone or as gates.

A backend file holds `gate(x [..., 2F], activation) -> [..., F]`: activation(first half) * second half, where
the activation is one of `ACTIVATIONS`; `activate(x [..., F], activation) -> [..., F]`, the same of x alone,
whose memory it may take: nobody may read x afterwards; and `modulate(x [T, F], gate [T, F], activation) -> [T, F]`:
x * activation(gate), in float32 and rounded once, where the activation is "silu" or "sigmoid".

"relu2" is the square of relu. "clamped_swiglu" is that of gpt-oss: gates are held below 7 and pass through
g * sigmoid(1.702 g), what they gate is held between -7 and 7, and 1 is added to it; it is a gate only.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
