"""Matrix products with a model's weights.

A backend file holds

    prepare(weight [O, I]) -> weight
    linear(x [..., I], weight [O, I], bias [O] | None) -> [..., O]

`linear` is x @ weight.T + bias in x's dtype; every product with a weight goes through it. It takes plain weights
and what `prepare` makes of them. `prepare` is called once for each complete weight: it returns the weight as it
is, or in a layout that only `linear` can read, of the same shape and dtype; then the plain one may be let go.
"""
