"""Formats of quantised checkpoints, one file each: `FORMATS` in config/quantization.py.

A file defines

    derive(stored: Stored, fields: Fields) -> Derived

which maps the names, dtypes and shapes of stored tensors to the model's tensors. Layers then read the model's tensors
as from an unquantised checkpoint, including experts and the shards of ranks.
"""
