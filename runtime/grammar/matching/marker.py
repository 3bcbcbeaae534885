"""Find the text in an output after which the constraint begins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allowing_all_but

MAX_BYTES = 256


class Marker:
    """Searches for a text, for example `</think>`, in the bytes of tokens. Not thread-safe.

    The constraint begins with the token after the one that completes the text. If the completing token had further
    bytes, the constraint would not check them. Therefore tokens that complete the text and then continue with more than
    whitespace are forbidden.
    """

    def __init__(self, text: str, token_bytes: Mapping[int, bytes], vocab_size: int) -> None:
        self._text = text.encode()
        self._bytes = token_bytes
        self._vocab_size = vocab_size
        self._fallback = _failures(self._text)
        self._candidates: list[int] | None = None
        self._masks: dict[int, NDArray[np.int32] | None] = {}

    def advance(self, num_matched: int, token_id: int) -> int:
        """Return the number of matched bytes after `token_id`. It equals `length` if the token completes the text."""
        return self._advance(num_matched, self._bytes[token_id])[0]

    @property
    def length(self) -> int:
        return len(self._text)

    def mask(self, num_matched: int, num_words: int) -> NDArray[np.int32] | None:
        """Return a mask without the forbidden tokens, int32 [num_words], or None if no token is forbidden."""
        if num_matched not in self._masks:
            forbidden = [token_id for token_id in self._completing() if self._overruns(num_matched, token_id)]
            self._masks[num_matched] = allowing_all_but(forbidden, num_words) if forbidden else None
        return self._masks[num_matched]

    def _completing(self) -> list[int]:
        """Return the tokens that may be forbidden: those with more than whitespace after the marker's last byte."""
        if self._candidates is None:
            last = self._text[-1:]
            self._candidates = [
                token_id
                for token_id in range(self._vocab_size)
                if (token := self._bytes[token_id]) and last in token[:-1] and token.partition(last)[2].strip()
            ]
        return self._candidates

    def _overruns(self, num_matched: int, token_id: int) -> bool:
        token = self._bytes[token_id]
        matched, at = self._advance(num_matched, token)
        return matched == len(self._text) and bool(token[at:].strip())

    def _advance(self, num_matched: int, token: bytes) -> tuple[int, int]:
        """Return the matched bytes, and the bytes of the token that were read (Knuth-Morris-Pratt search)."""
        text, fallback = self._text, self._fallback
        for at, byte in enumerate(token, 1):
            while num_matched and text[num_matched] != byte:
                num_matched = fallback[num_matched]
            if text[num_matched] == byte:
                num_matched += 1
            if num_matched == len(text):
                return num_matched, at
        return num_matched, len(token)


def _failures(text: bytes) -> list[int]:
    """Return a list whose entry i is the length of the longest proper suffix of text[:i] that is also its prefix."""
    lengths, length = [0, 0], 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = lengths[length]
        length += text[at] == text[length]
        lengths.append(length)
    return lengths
