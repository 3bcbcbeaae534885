"""Finding the text behind which an output is constrained."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allowing_all_but

MAX_BYTES = 256


class Marker:
    """A text such as `</think>`, looked for in the bytes of tokens. Used by one thread at a time.

    The constraint begins with the token after the one that completes the text. What such a token holds behind the text
    belongs to neither side, so tokens in which that is more than blanks are forbidden where they would complete it.
    """

    def __init__(self, text: str, token_bytes: Mapping[int, bytes], vocab_size: int) -> None:
        self._text = text.encode()
        self._bytes = token_bytes
        self._vocab_size = vocab_size
        self._fallback = _failures(self._text)
        self._candidates: list[int] | None = None
        self._masks: dict[int, NDArray[np.int32] | None] = {}

    def advance(self, matched: int, token_id: int) -> int:
        """How many bytes of the text are matched after one more token; all of them, as soon as they once were."""
        return self._advance(matched, self._bytes[token_id])[0]

    @property
    def length(self) -> int:
        return len(self._text)

    def mask(self, matched: int, num_words: int) -> NDArray[np.int32] | None:
        """int32 [num_words] without the forbidden tokens; None where there are none."""
        if matched not in self._masks:
            forbidden = [token_id for token_id in self._completing() if self._overruns(matched, token_id)]
            self._masks[matched] = allowing_all_but(forbidden, num_words) if forbidden else None
        return self._masks[matched]

    def _completing(self) -> list[int]:
        """Tokens with the text's last byte and more behind it than blanks."""
        if self._candidates is None:
            last = self._text[-1:]
            self._candidates = [
                token_id
                for token_id in range(self._vocab_size)
                if (token := self._bytes[token_id])
                and last in token[:-1]
                and token.partition(last)[2].strip()
            ]
        return self._candidates

    def _overruns(self, matched: int, token_id: int) -> bool:
        token = self._bytes[token_id]
        found, at = self._advance(matched, token)
        return found == len(self._text) and bool(token[at:].strip())

    def _advance(self, matched: int, token: bytes) -> tuple[int, int]:
        """(bytes matched, bytes of the token that were looked at): Knuth, Morris and Pratt."""
        text, fallback = self._text, self._fallback
        for at, byte in enumerate(token, 1):
            while matched and text[matched] != byte:
                matched = fallback[matched]
            if text[matched] == byte:
                matched += 1
            if matched == len(text):
                return matched, at
        return matched, len(token)


def _failures(text: bytes) -> list[int]:
    """[i]: the longest proper suffix of text[:i] that is a prefix of it."""
    found, length = [0, 0], 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = found[length]
        length += text[at] == text[length]
        found.append(length)
    return found
