"""Models without a native family: transformers' modules with Penstock's attention, cache and batches."""
