"""The bytes of every token, for tokenizers that decode tokens independently of their neighbours.

With nearly all tokenizers, a text is the concatenation of its tokens' bytes, decoded as UTF-8. A character may span
several tokens. The first token of a text may lose its leading space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from runtime.tokenizer.backend import Backend, FastBackend
from runtime.tokenizer.pieces import PiecesBackend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Tables from token id to bytes, computed on first use. Ids beyond the vocabulary have no bytes.

    `first[i]` has the bytes of token i at the beginning of a text, `rest[i]` its bytes elsewhere. In `first_skipping`
    and `rest_skipping`, special tokens have no bytes.
    """

    def __init__(self, backend: Backend, first: Callable[[int], bytes], rest: Callable[[int], bytes]) -> None:
        self.rest: Mapping[int, bytes] = _Table(rest, {})
        self.first: Mapping[int, bytes] = _Table(first, {})
        skipped = dict.fromkeys(backend.special_ids, b"")
        self.rest_skipping: Mapping[int, bytes] = _Table(self.rest.__getitem__, skipped)
        self.first_skipping: Mapping[int, bytes] = _Table(self.first.__getitem__, skipped)
        self._backend = backend
        self._showing: dict[frozenset[int], tuple[Mapping[int, bytes], Mapping[int, bytes]]] = {}

    def tables(
        self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> tuple[Mapping[int, bytes], Mapping[int, bytes]]:
        """Return (table for a text's first token, table for other tokens). Tokens in `shown_ids` are never skipped."""
        if not skip_special_tokens:
            return self.first, self.rest
        if not shown_ids:
            return self.first_skipping, self.rest_skipping
        if shown_ids not in self._showing:
            skipped = dict.fromkeys(self._backend.special_ids - shown_ids, b"")
            self._showing[shown_ids] = (
                _Table(self.first.__getitem__, skipped),
                _Table(self.rest.__getitem__, skipped),
            )
        return self._showing[shown_ids]

    def counts(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token can be the first token of a text. Skipped special tokens and unknown ids cannot."""
        if skip_special_tokens and token_id in self._backend.special_ids:
            return False
        return self._backend.token(token_id) is not None


class _Table(dict[int, bytes]):
    def __init__(self, find: Callable[[int], bytes], known: Mapping[int, bytes]) -> None:
        super().__init__(known)
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        content = self[token_id] = self._find(token_id)
        return content


def token_bytes_of(backend: Backend) -> TokenBytes | None:
    """Return the bytes of each token, or None if they depend on neighbouring tokens or are not known."""
    if isinstance(backend, PiecesBackend):
        return TokenBytes(backend, backend.bytes_of, backend.bytes_after)
    if not isinstance(backend, FastBackend):
        return None
    decoder = backend.library.decoder
    state: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
    stages = _stages(state)
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return _byte_level(backend)
    if kinds in ([], ["Metaspace"], ["WordPiece"]) or _is_sentencepiece(stages):
        return _probed(backend, byte_fallback="ByteFallback" in kinds)
    return None


def _stages(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state.get("type") != "Sequence":
        return [state] if state else []
    return [stage for inner in state["decoders"] for stage in _stages(inner)]


def _is_sentencepiece(stages: list[dict[str, Any]]) -> bool:
    """Whether the decoder only replaces strings, decodes bytes and strips one space at the beginning."""
    kinds = [stage["type"] for stage in stages]
    if re.fullmatch(r"(Replace )*(ByteFallback )?(Fuse )?(Strip )?", "".join(f"{kind} " for kind in kinds)) is None:
        return False
    if not all("String" in stage["pattern"] for stage in stages if stage["type"] == "Replace"):
        return False
    if kinds[-1] == "Strip":
        strip = stages[-1]
        return "Fuse" in kinds and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
    return True


def _byte_level(backend: FastBackend) -> TokenBytes:
    alphabet = _byte_of_character()

    def find(token_id: int) -> bytes:
        token = backend.token(token_id) or ""
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, which is stored as plain text
            return token.encode()

    return TokenBytes(backend, find, find)


def _probed(backend: FastBackend, *, byte_fallback: bool) -> TokenBytes:
    """Return tables that decode tokens on access: alone for `first`, and after another token for `rest`."""
    anchor = _anchor(backend, byte_fallback)
    before = len(backend.decode([anchor], False))

    def first(token_id: int) -> bytes:
        byte = _byte(backend.token(token_id)) if byte_fallback else None
        if byte is not None and not byte.isspace():
            return byte
        return backend.decode([token_id], False).encode()

    def rest(token_id: int) -> bytes:
        byte = _byte(backend.token(token_id)) if byte_fallback else None
        if byte is not None:
            return byte
        return backend.decode([anchor, token_id], False)[before:].encode()

    return TokenBytes(backend, first, rest)


def _anchor(backend: FastBackend, byte_fallback: bool) -> int:
    for token_id in range(backend.vocab_size):
        if byte_fallback and _byte(backend.token(token_id)) is not None:
            continue
        if backend.decode([token_id], False):
            return token_id
    return 0


def _byte(token: str | None) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token or "")
    return bytes.fromhex(match[1]) if match else None


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: character -> byte.

    Printable Latin-1 characters stand for themselves; the other bytes have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
