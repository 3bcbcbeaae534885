"""Matrix products with a model's weights.

A backend file holds

    prepare(weight [O, I], *, bits=None) -> weight
    prepare_grouped(weight: GroupedWeight, dtype, *, out_size=None, into=None, first=0) -> weight
    linear(x [..., I], weight [O, I], bias [O] | None) -> [..., O]
    logits(x [R, I], weight [O, I]) -> [R, O]

`linear` is x @ weight.T + bias in x's dtype, `logits` is x @ weight.T in x's dtype or, where that costs nothing, in
float32; every product with a weight goes through one of them. They take plain weights and what `prepare` makes of
them. `prepare` is called once for each complete weight: it returns the weight as it is, or in a layout that only
products can read, of the same shape; then the plain one may be let go. With `bits` 8 it is rounded, each output with a
scale of its own; a backend that cannot do that raises ValueError. `prepare_grouped` is the same for weights of 4 to 8
bits (`ops/matmul/grouped.py`) and products in `dtype`: they stay so, or become plain ones where a backend has
no kernel for them. Only where they stay are the rows of x rounded, if the weight says that they may be. A large weight
may come in pieces, to the kernels in C++ alone: with the first rows it is said how many there will be (`out_size`), the
others are put `into` what that gave, from row `first` on, a multiple of the panels' 32.
"""
