"""Reads the tokens of external corpora from files, texts and token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from runtime.errors import InvalidRequest
from runtime.speculative.corpus import SEPARATOR, Tokens

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

PART_CHARS = 16_384  # longer documents are tokenised in parts of this length
BATCH_CHARS = 65_536  # characters per call of the tokenizer, which then holds the GIL for about 1 ms to return the ids
IDS_AT_ONCE = 16_384  # ids per conversion to an array, which holds the GIL too
MAX_LINE_BYTES = 16 * 2**20  # maximum length of a line of a corpus file


def joined_tokens(pieces: Iterable[Tokens], param: str, limit: int) -> Tokens:
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


def tokens_of_ids(documents: list[list[int]], vocab_size: int) -> Iterator[Tokens]:
    """Yield the tokens of documents that are given as token ids. Raises `InvalidRequest` for unknown ids."""
    for ids in documents:
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            if min(part) < 0 or max(part) >= vocab_size:
                raise InvalidRequest(f"Token ids must be in [0, {vocab_size}).", param="token_chunks")
            yield np.array(part, np.int32)
        if ids:
            yield np.array([SEPARATOR], np.int32)


def tokens_of_texts(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
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


def texts_of_file(path: str) -> Iterator[str]:
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
