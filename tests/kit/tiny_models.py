"""Tiny complete models: a random checkpoint with a tokenizer in one directory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_checkpoints
import tiny_tokenizers

CONTEXT = 2048


def cached(family: str = "llama", kind: tiny_tokenizers.Kind = "byte_bpe", **shape: int) -> str:
    """Return a model that tests only read. It is written once per process. `shape` are fields of its configuration."""
    return _written(family, kind, tuple(sorted(shape.items())))


@cache
def _written(family: str, kind: tiny_tokenizers.Kind, shape: tuple[tuple[str, int], ...]) -> str:
    directory = Path(_scratch().name) / "-".join([family, kind, *(f"{name}_{value}" for name, value in shape)])
    directory.mkdir()
    vocab_size = tiny_tokenizers.write(directory, kind=kind).vocab_size
    fields: dict[str, Any] = {"max_position_embeddings": CONTEXT, **dict(shape)}
    tiny_checkpoints.write(directory, family, vocab_size=vocab_size, **fields)
    return str(directory)


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-models-")
