"""Refuse texts that are far too long before they are encoded, by a lower bound on their number of tokens."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from runtime.errors import ContextOverflow
from runtime.tokenizer.backend import Backend, FastBackend

# Encoding needs about a hundred times the memory of the text. After texts of at least this size, free memory is
# returned to the system (`give_back_memory`).
LARGE_TEXT_BYTES = 256 * 1024
CHARS_AT_ONCE = 65_536  # number of characters counted at a time; counting them holds the GIL for 0.1 ms
# Normalizer -> the largest factor by which it shrinks a text, in UTF-8 bytes. Other normalizers may drop any amount of
# text.
_NORMALIZERS = {"Prepend": 1, "Replace": 1, "ByteLevel": 1, "NFC": 3, "NFD": 1, "NFKC": 4, "NFKD": 4}
_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation")


class TextLimit:
    """Computes a lower bound on the tokens of a text: its bytes divided by the bytes of the longest token."""

    def __init__(self, bytes_per_token: int, ignores_spaces: bool) -> None:
        self.bytes_per_token = bytes_per_token  # maximum bytes of the client's text that one token can stand for
        self._ignores_spaces = ignores_spaces  # whether added tokens may absorb spaces next to them

    def least_tokens(self, parts: Sequence[str], enough: int) -> int:
        """Return a lower bound on the number of tokens of the joined parts. Counting stops at `enough`."""
        enough_bytes = enough * self.bytes_per_token
        if sum(map(len, parts)) * 4 < enough_bytes:
            return 0
        size = 0
        for piece in _pieces(parts):
            if self._ignores_spaces:
                piece = "".join(piece.split())
            size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
            if size >= enough_bytes:
                break
        return size // self.bytes_per_token

    def check(self, parts: Sequence[str], context_length: int) -> None:
        """Raise `ContextOverflow` if the joined parts cannot fit the context. For long texts, call this in a thread."""
        self._require(self.least_tokens(parts, context_length + 1), parts, context_length)

    def check_length(self, text: str, context_length: int) -> None:
        """Raise `ContextOverflow` if the text has too many characters to fit. Takes constant time."""
        if not self._ignores_spaces:
            self._require(len(text) // self.bytes_per_token, [text], context_length)

    def _require(self, least: int, parts: Sequence[str], context_length: int) -> None:
        if least > context_length:
            raise ContextOverflow(
                f"The input ({sum(map(len, parts))} characters, at least {least} tokens) is longer than the model's "
                f"context length ({context_length} tokens).",
                param="text",
            )


def _pieces(parts: Sequence[str]) -> Iterator[str]:
    """Yield the text in pieces, so that other threads can take the GIL between two pieces."""
    for part in parts:
        for start in range(0, len(part), CHARS_AT_ONCE):
            yield part[start : start + CHARS_AT_ONCE]


def text_limit_of(backend: Backend) -> TextLimit | None:
    """Return the limit for this tokenizer.

    Returns None if there is no bound, because the tokenizer may drop text or encode unknown text of any length as one
    token.
    """
    if not isinstance(backend, FastBackend):
        return None
    library, shrinks = backend.library, 1
    for step in _steps(library.normalizer, "normalizers"):
        if step["type"] not in _NORMALIZERS or (step["type"] == "Replace" and not step.get("content")):
            return None
        shrinks *= _NORMALIZERS[step["type"]]
    steps = [*_steps(library.pre_tokenizer, "pretokenizers")]
    if any(step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed" for step in steps):
        return None
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not in_bytes and getattr(library.model, "byte_fallback", False) is not True:
        return None
    # Each character of a byte-level token stands for one byte.
    longest = max((len(token) if in_bytes else len(token.encode()) for token in library.get_vocab()), default=0)
    added = library.get_added_tokens_decoder().values()
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    strips = any(token.lstrip or token.rstrip for token in added)
    return TextLimit(longest * shrinks, strips) if longest else None


def _steps(component: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer of `tokenizers`, with nested sequences flattened."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), inner)


def _flat(state: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    if state.get("type") == "Sequence":
        return [step for part in state[inner] for step in _flat(part, inner)]
    return [state]


def give_back_memory() -> None:
    """Return the C allocator's free memory to the system. Encoding long texts leaves hundreds of MB unused in it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # a C library without `malloc_trim`
        return None
