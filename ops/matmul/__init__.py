"""Matrix products with a model's weights.

A backend file defines

    prepare(weight [O, I], *, bits=None) -> weight
    prepare_grouped(weight: GroupedWeight, dtype, *, out_size=None, into=None, first=0) -> weight
    linear(x [..., I], weight [O, I], bias [O] | None) -> [..., O]
    logits(x [R, I], weight [O, I]) -> [R, O]
    row_group(weight) -> int | None

`linear` returns x @ weight.T + bias in x's dtype. `logits` returns x @ weight.T in float32 if this costs the backend no
additional time, otherwise in x's dtype. All products with weights use `linear` or `logits`, which accept unprepared and
prepared weights.

`prepare` is called once per complete weight. It returns the weight unchanged, or a tensor of the same shape in a layout
that only these products can read. In the second case the caller may free the original. With bits=8 it quantises the
weight to 8 bits with one scale per output. It raises ValueError if the backend does not support `bits`.

`prepare_grouped` does the same for weights with 4 to 8 bits (`ops/matmul/grouped.py`) and products in `dtype`. A
backend without a kernel for such weights dequantises them. Products with a grouped weight may round the rows of x if
the weight permits it (`rounded_rows`). The C++ backend accepts a large weight in parts, one part per call. In the first
call, `out_size` is the total number of rows. In each later call, `into` is the tensor that the first call returned, and
`first` is the index of the part's first row, a multiple of the panel width 32.

`row_group` returns the number of inputs per scale if `linear` rounds the rows of x to float8 for this weight, and other
operations can round them in the same way (`RoundedRows` in `ops/matmul/rounded_rows.py`); otherwise None.
"""
