"""Add, remove and list external corpora, from which prompt lookup (NGRAM) proposes draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import uuid4

from runtime.actors.corpus_texts import joined_tokens, texts_of_file, tokens_of_ids, tokens_of_texts
from runtime.errors import InvalidRequest
from serve.calls.decode import Length

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

CorpusId = Annotated[str, Length(1, 4096)]  # the id of a corpus that is loaded at the start is its path


@dataclass(slots=True, kw_only=True)
class AddCorpusBody:
    """The body of `/add_external_corpus`. Exactly one of `file_path`, `documents` and `token_chunks` must be set."""

    closed: ClassVar[bool] = True

    corpus_id: CorpusId | None = None  # None: a random id
    file_path: Annotated[str, Length(1, 4096)] | None = None  # a file on the server's machine, one JSON string per line
    documents: list[str] | None = None
    token_chunks: list[list[int]] | None = None  # the token ids of each document


@dataclass(slots=True, kw_only=True)
class RemoveCorpusBody:
    """The body of `/remove_external_corpus`."""

    closed: ClassVar[bool] = True

    corpus_id: CorpusId


async def add_corpus(core: EngineCore, body: AddCorpusBody) -> dict[str, Any]:
    """Add a corpus. Returns SGLang's answer when all replicas use the corpus.

    Raises `InvalidRequest` if the engine does not use NGRAM, or if the corpus cannot be read or is too large.
    """
    _check_lookup(core)
    if not core.plan.scheduler.max_corpus_drafts:
        raise InvalidRequest("This server was started with --speculative-ngram-external-sam-budget 0; set at least 1.")
    given = {"file_path": body.file_path, "documents": body.documents, "token_chunks": body.token_chunks}
    if sum(value is not None for value in given.values()) != 1:
        raise InvalidRequest("Set exactly one of file_path, documents and token_chunks.")
    param = next(name for name, value in given.items() if value is not None)
    if body.token_chunks is not None:
        pieces = tokens_of_ids(body.token_chunks, core.facts.vocab_size)
    elif core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; send token_chunks instead of text.", param=param)
    else:
        texts = body.documents if body.documents is not None else texts_of_file(body.file_path or "")
        pieces = tokens_of_texts(texts, core.tokenizer)
    corpus_id = body.corpus_id or uuid4().hex
    count = await core.corpora.add(corpus_id, partial(joined_tokens, pieces, param))
    return {"success": True, "corpus_id": corpus_id, "message": "", "loaded_token_count": count}


async def remove_corpus(core: EngineCore, corpus_id: str) -> dict[str, Any]:
    """Remove a corpus. Raises `InvalidRequest` if no corpus has this id, or if the engine does not use NGRAM."""
    _check_lookup(core)
    await core.corpora.remove(corpus_id)
    return {"success": True, "message": ""}


def list_corpora(core: EngineCore) -> dict[str, Any]:
    """Return the number of tokens of each corpus. Raises `InvalidRequest` if the engine does not use NGRAM."""
    _check_lookup(core)
    return {"success": True, "corpus_token_counts": core.corpora.token_counts, "message": ""}


def _check_lookup(core: EngineCore) -> None:
    if not core.plan.scheduler.max_lookup_drafts:
        raise InvalidRequest("This server does not use corpora; start it with --speculative-algorithm NGRAM.")
