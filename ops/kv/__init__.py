"""Writes to the paged KV cache, and copies of pages within a device and between device and host.

A backend file defines

    store(k, v, k_pool, v_pool, metadata, *, k_scale=1.0, v_scale=1.0) -> None
    copy_pages(sources, targets, source_pages, target_pages) -> None

`store` writes the step's keys and values k, v [T, K, D] to the contiguous pools k_pool, v_pool [P, K, page, D], at the
slots in metadata.slot_mapping, in the pool's dtype. For float8 pools (e4m3fn, e5m2), `store` first divides keys by
`k_scale` and values by `v_scale`, and clamps them to the largest value of the dtype. For other pools the scales must be
1. The slots of one step are distinct, except those of padding, which are in a page that no row reads.

`copy_pages` copies the pages `source_pages` (int64 [N]) of each pool in `sources` to the pages `target_pages` (int64
[N], distinct) of the pool at the same position in `targets`. Both pools are [P, K, page, D], and may differ in P. Each
page is contiguous; the stride between pages is arbitrary. Both pools may be the same tensor if no page is both a source
and a target. The page ids are on the device that copies. Either pool may be in page-locked host memory, which a GPU's
kernels can access.
"""
