"""Rank documents by how well they match a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.prompts import MAX_PROMPTS
from serve.calls.scores.ranking import Answers, Scores, rank, truncation
from serve.calls.work_budget import check_joined

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class Document:
    """A document as an object with the key `text`."""

    text: str


@dataclass(slots=True, kw_only=True)
class RerankBody:
    """The body of /v1/rerank and /rerank. `user` is accepted without effect."""

    query: Annotated[str, Length(1, 1 << 22)]
    documents: Annotated[list[str | Document], Length(1, MAX_PROMPTS)]
    model: str | None = None
    top_n: Annotated[int, Range(1, 1 << 20)] | None = None
    return_documents: bool = True
    instruction: Annotated[str, Length(1, 4096)] | None = None
    truncate: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = None  # vLLM's name of truncate
    max_tokens_per_doc: NotBuilt = None  # this field and those below are fields of other servers' rerank APIs
    max_chunks_per_doc: NotBuilt = None
    rank_fields: NotBuilt = None
    use_activation: Literal[True] = True
    priority: NotBuilt = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Ranked(NamedTuple):
    """One document and its score. `request` and `chunk` are None if the document has no request of its own."""

    index: int
    score: float
    text: str
    request: Request | None
    chunk: Chunk | None


def rank_documents(core: EngineCore, body: RerankBody) -> tuple[list[Request], Scores]:
    """Return the requests, and the function that scores their answers.

    Raises `InvalidRequest` for an empty document, too much text, and models that cannot rank. Call it in a thread,
    because a chat model needs one rendered chat per document.
    """
    for index, text in enumerate(body.texts):
        if not text:
            raise InvalidRequest(f"documents.{index} must not be empty.", param=f"documents.{index}")
    check_joined(body.query, body.texts, "query")
    pairs = [(body.query, text) for text in body.texts]
    return rank(core, pairs, instruction=body.instruction, truncate=truncation(core, body))


def order(
    texts: Sequence[str], requests: Sequence[Request], scores: Scores, answers: Answers, top_n: int | None
) -> list[Ranked]:
    """Return the best `top_n` documents, best first. Documents with equal scores keep their order."""
    has_own_requests = len(requests) == len(texts)
    ranked = [
        Ranked(
            index,
            score,
            text,
            requests[index] if has_own_requests else None,
            answers[index][0] if has_own_requests else None,
        )
        for index, (score, text) in enumerate(zip(scores(answers), texts, strict=True))
    ]
    return sorted(ranked, key=lambda each: -each.score)[:top_n]
