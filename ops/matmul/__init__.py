"""Matrix products with a model's weights.

A backend file holds `linear(x [..., I], weight [O, I], bias [O] | None) -> [..., O]`, x @ weight.T + bias in
x's dtype. Every product with a weight goes through it, so a backend that wants another layout of the weights
needs only one more function here and one caller: the loader, when a weight is complete.
"""
