"""Constrained decoding: JSON schemas, regular expressions and grammars that an output must match."""
