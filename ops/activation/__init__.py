"""Gated activations.

A backend file holds `gate(x [..., 2F], activation) -> [..., F]`: activation(first half) * second half, where
the activation is one of `ACTIVATIONS`.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
