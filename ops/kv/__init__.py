"""Writing keys and values into the paged cache.

A backend file holds `store(k, v, k_pool, v_pool, inputs) -> None`:

    k, v            [T, K, D]          of the step's tokens
    k_pool, v_pool  [P, K, page, D]    contiguous, written in place at inputs.slots

Values are converted to the pool's dtype. Slots of one step are distinct but for padding, whose page nobody
reads.
"""
