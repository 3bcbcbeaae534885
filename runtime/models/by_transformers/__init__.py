"""Models without a native family. They run transformers' modules with Penstock's attention, cache and batches."""
