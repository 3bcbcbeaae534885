"""Model families, one file each, and the table of architectures: `decoders.py`, `encoders.py`, `registry.py`."""
