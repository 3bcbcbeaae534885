"""Add, remove and list external corpora, from which prompt lookup (NGRAM) proposes draft tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import uuid4

import numpy as np
import orjson

from runtime.errors import InvalidRequest
from runtime.speculative.corpus import SEPARATOR, Tokens
from serve.calls.decode import Length

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer

CorpusId = Annotated[str, Length(1, 256)]
PART_CHARS = 16_384  # longer documents are tokenised in parts of this length
BATCH_CHARS = 65_536  # characters per call of the tokenizer, which then holds the GIL for about 1 ms to return the ids
IDS_AT_ONCE = 16_384  # ids per conversion to an array, which holds the GIL too
MAX_LINE_BYTES = 16 * 2**20  # maximum length of a line of a corpus file


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
    given = {"file_path": body.file_path, "documents": body.documents, "token_chunks": body.token_chunks}
    if sum(value is not None for value in given.values()) != 1:
        raise InvalidRequest("Set exactly one of file_path, documents and token_chunks.")
    param = next(name for name, value in given.items() if value is not None)
    if body.token_chunks is not None:
        pieces = _of_ids(body.token_chunks, core.facts.vocab_size)
    elif core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; send token_chunks instead of text.", param=param)
    else:
        texts = body.documents if body.documents is not None else _lines(body.file_path or "")
        pieces = _of_texts(texts, core.tokenizer)
    corpus_id = body.corpus_id or uuid4().hex
    count = await core.corpora.add(corpus_id, partial(_collected, pieces, param))
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


def _collected(pieces: Iterable[Tokens], param: str, limit: int) -> Tokens:
    """Join the tokens of a corpus. Raises `InvalidRequest` if there are none, or more than `limit`."""
    found, left = list[Tokens](), limit
    for piece in pieces:
        found.append(piece)
        left -= len(piece)
        if left < 0:
            raise InvalidRequest(
                f"The corpus is too large: at most {limit:,} more tokens are allowed, one of them for each document.",
                param=param,
            )
    if not found:
        raise InvalidRequest("The corpus has no tokens.", param=param)
    return np.concatenate(found)


def _of_ids(documents: list[list[int]], vocab_size: int) -> Iterator[Tokens]:
    """Yield the tokens of documents that are given as token ids. Raises `InvalidRequest` for unknown ids."""
    for ids in documents:
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            if min(part) < 0 or max(part) >= vocab_size:
                raise InvalidRequest(f"Token ids must be in [0, {vocab_size}).", param="token_chunks")
            yield np.array(part, np.int32)
        if ids:
            yield np.array([SEPARATOR], np.int32)


def _of_texts(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of documents, without special tokens."""
    batch, ends, size = list[str](), list[bool](), 0
    for part, is_last in _parts(texts):
        batch.append(part)
        ends.append(is_last)
        size += len(part)
        if size >= BATCH_CHARS:
            yield from _encoded(batch, ends, tokenizer)
            batch, ends, size = [], [], 0
    if batch:
        yield from _encoded(batch, ends, tokenizer)


def _parts(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it ends its document) for each part of all documents that are not empty."""
    for text in texts:
        for start in range(0, len(text), PART_CHARS):
            yield text[start : start + PART_CHARS], start + PART_CHARS >= len(text)


def _encoded(batch: list[str], ends: list[bool], tokenizer: Tokenizer) -> Iterator[Tokens]:
    for ids, is_last in zip(tokenizer.encode_batch(batch, add_special_tokens=False), ends, strict=True):
        yield np.array([*ids, SEPARATOR] if is_last else ids, np.int32)


def _lines(path: str) -> Iterator[str]:
    """Yield the documents of a file with a JSON string per line. Empty lines are skipped.

    Raises `InvalidRequest` if the file cannot be read or has other contents.
    """
    if "\0" in path or "://" in path or not Path(path).is_file():
        raise InvalidRequest("file_path must be a file of this machine.", param="file_path")
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if not line.strip():
                    continue
                text = orjson.loads(line) if len(line) <= MAX_LINE_BYTES else None
                if not isinstance(text, str):
                    raise InvalidRequest(
                        f"Line {number} is not a JSON string of at most {MAX_LINE_BYTES:,} bytes.", param="file_path"
                    )
                yield text
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"Line {number} is not JSON.", param="file_path") from error
    except OSError as error:
        raise InvalidRequest(f"The file cannot be read: {error.strerror}.", param="file_path") from error
