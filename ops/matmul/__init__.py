"""Matrix products with a model's weights.

A backend file defines

    prepare(weight [O, I], *, bits=None) -> weight
    prepare_grouped(weight: GroupedWeight, dtype, *, out_size=None, into=None, first=0) -> weight
    linear(x [..., I], weight [O, I], bias [O] | None) -> [..., O]
    logits(x [R, I], weight [O, I]) -> [R, O]
    row_group(weight) -> int | None

`linear` returns x @ weight.T + bias in x's dtype. `logits` returns x @ weight.T, in float32 if this takes the backend
no additional time, otherwise in x's dtype. Both accept prepared and unprepared weights.

`prepare` is called once per complete weight. It returns the weight unchanged, or a tensor of the same shape in a layout
that only `linear` and `logits` can read. In the second case the caller may free the original. With bits=8 `prepare`
quantises the weight to 8 bits with one scale per output. It raises ValueError if the backend does not support `bits`.

`prepare_grouped` prepares weights with 4 to 8 bits and a scale per group of inputs (`ops/matmul/grouped.py`), for
products in `dtype`. A backend without a kernel for such weights dequantises them. Products may round the rows of x if
the weight permits it (`rounded_rows`). The C++ backend accepts a large weight in parts, one part per call. In the first
call, `out_size` is the total number of rows. In each later call, `into` is the tensor that the first call returned, and
`first` is the index of the part's first row, a multiple of 32 (the width of a panel).

`row_group` returns the number of inputs per scale if `linear` rounds the rows of x to float8 for this weight and the
operation before it can do this rounding (`RoundedRows` in `ops/matmul/rounded_rows.py`). Otherwise it returns None.
"""
