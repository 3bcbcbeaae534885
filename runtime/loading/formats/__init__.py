"""Formats of quantised checkpoints. Each file reads one format; config/quantization.py lists them in `FORMATS`.

A file defines

    derive(stored: Stored, fields: Fields) -> Derived

which maps the names, dtypes and shapes of stored tensors to the model's tensors. Layers then read the model's tensors
as from an unquantised checkpoint, including experts and the shards of ranks.
"""
