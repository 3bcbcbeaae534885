"""Tiny complete models: a random checkpoint with a tokenizer in one directory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tiny_checkpoints
import tiny_tokenizers

CONTEXT = 2048


def cached(family: str = "llama", kind: tiny_tokenizers.Kind = "byte_bpe") -> str:
    """Return a model that tests only read. It is written once per process."""
    return _written(family, kind)


@cache
def _written(family: str, kind: tiny_tokenizers.Kind) -> str:
    directory = Path(_scratch().name) / f"{family}-{kind}"
    directory.mkdir()
    vocab_size = tiny_tokenizers.write(directory, kind=kind).vocab_size
    tiny_checkpoints.write(directory, family, vocab_size=vocab_size, max_position_embeddings=CONTEXT)
    return str(directory)


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-models-")
