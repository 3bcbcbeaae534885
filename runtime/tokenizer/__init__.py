"""Tokenizers, chat templates, incremental decoding and stop strings. Does not import torch."""
