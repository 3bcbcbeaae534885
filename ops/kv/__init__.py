"""Writing keys and values into the paged cache, and copying its pages.

A backend file holds `store(k, v, k_pool, v_pool, metadata, *, k_scale=1.0, v_scale=1.0) -> None`:

    k, v            [T, K, D]          of the step's tokens
    k_pool, v_pool  [P, K, page, D]    contiguous, written in place at metadata.slot_mapping

Values are converted to the pool's dtype. A pool of one byte per value (float8 e4m3fn or e5m2) holds them
divided by the scale, and what it cannot hold becomes the largest value that it can; scales of other pools
are 1. Slots of one step are distinct but for padding, whose page nobody reads.

And `copy_pages(k_pool, v_pool, sources, targets) -> None`: the pages `sources` (int64 [N]) are copied to
`targets` (int64 [N], distinct) in both pools. No page is both a source and a target.
"""
