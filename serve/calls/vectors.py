"""Embeddings of prompts: check that the model computes embeddings, and shorten embeddings to `dimensions`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest
from runtime.request import Chunk

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


def check_vectors(core: EngineCore, dimensions: int | None) -> None:
    """Raise `InvalidRequest` if the model computes no embeddings, or its embeddings are shorter than `dimensions`."""
    if core.facts.labels:
        raise InvalidRequest("This model gives scores of labels, not vectors: use /classify or /v1/rerank.")
    size = core.facts.vector_size
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(
            f"dimensions must be at most {size}, the size of this model's vectors.", param="dimensions"
        )


def vector_of(chunk: Chunk, dimensions: int | None) -> list[float]:
    """Return the embedding of an answer. If `dimensions` is set, return its first numbers, scaled to length 1.

    Shortening follows Matryoshka representations (arXiv 2205.13147). Raises `InvalidRequest` if the request was
    aborted.
    """
    if chunk.embedding is None:
        raise InvalidRequest("The request was aborted before its vector was computed.")
    return shortened(chunk.embedding, dimensions)


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers, scaled to length 1, or the whole vector if `dimensions` is None."""
    if dimensions is None or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in first))
    return [number / length for number in first] if length else first
