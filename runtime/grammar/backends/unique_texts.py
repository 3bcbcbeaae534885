"""Enforce `uniqueItems` while an output is generated, because no grammar can express it.

Items are strings, or objects that differ in a string property. An array is identified by the name of the nearest
property that contains it. If one array with a name needs unique items, all arrays with this name get unique items. The
grammar allows only one spelling of each string, so equal strings have equal bytes.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allowing_all_but, allows, forbid
from runtime.grammar.schema.unique_items import MAX_LISTED, UniqueArrays

QUOTE, BACKSLASH = 0x22, 0x5C
TOKENS_BETWEEN_PAUSES = 256
# Maximum number of earlier strings that are compared with the tokens, among those that begin with the current string's
# text. If there are more, tokens with text before a quote are forbidden. Only a token that begins with the quote can
# then end the string.
MAX_COMPARED = 32


class QuotingTokens:
    """Index of a vocabulary's tokens by first bytes and by number of quotes. Built once, in about 50 ms."""

    def __init__(self, token_bytes: Mapping[int, bytes], vocab_size: int) -> None:
        self._by_first: dict[bytes, list[int]] = {}
        self._bytes = token_bytes
        self.by_tail: dict[bytes, list[int]] = {}  # tokens that begin a string; keys are the string's first bytes
        counted: dict[int, list[int]] = {2: [], 3: [], 4: []}
        ending: list[int] = []  # tokens with a quote after other bytes
        # Number of quotes in a token -> tokens with this number that have text after the last quote.
        beginning: dict[int, list[int]] = {1: [], 2: []}
        for token_id in range(vocab_size):
            if token_id % TOKENS_BETWEEN_PAUSES == 0:
                time.sleep(0)  # yield the GIL
            token = token_bytes[token_id]
            for length in (1, 2):
                if len(token) >= length:
                    self._by_first.setdefault(token[:length], []).append(token_id)
            quotes = token.count(b'"')
            if token.find(b'"') > 0:
                ending.append(token_id)
            for least, ids in counted.items():
                if quotes >= least:
                    ids.append(token_id)
            if quotes in beginning and not token.endswith(b'"'):
                beginning[quotes].append(token_id)
                self.by_tail.setdefault(token.rpartition(b'"')[2], []).append(token_id)
        num_words = -(-vocab_size // 32)
        self.without_quotes = {least: allowing_all_but(ids, num_words) for least, ids in counted.items()}
        self.without_ending = allowing_all_but(ending, num_words)
        self.not_closing = allowing_all_but(self._by_first.get(b'"', []), num_words)
        self.not_into_text = {quotes: allowing_all_but(ids, num_words) for quotes, ids in beginning.items()}

    def equal(self, text: bytes) -> list[int]:
        """Return the ids of the tokens whose bytes are exactly `text`."""
        return [each for each in self.starting(text) if self._bytes[each] == text]

    def starting(self, prefix: bytes) -> list[int]:
        """Return the ids of the tokens whose bytes begin with `prefix`."""
        found = self._by_first.get(prefix[:2], [])
        return found if len(prefix) <= 2 else [each for each in found if self._bytes[each].startswith(prefix)]


# What must differ between an array's items -> the allowed strings. The key None means the items themselves; other keys
# are property names. The strings are sorted and include their closing quote; () allows any string.
_Unique = Mapping[str | None, tuple[bytes, ...]]


class _Frame:
    """An open array or object."""

    __slots__ = ("expects_key", "is_object", "key", "seen", "unique")

    def __init__(self, is_object: bool, key: str, unique: _Unique) -> None:
        self.is_object = is_object
        self.expects_key = is_object
        self.key = key  # an object's most recent property name; for an array, the nearest property that contains it
        self.unique = unique
        # Key of `unique` -> bytes of the earlier strings.
        self.seen: dict[str | None, set[bytes]] = {each: set() for each in unique}


class UniqueTexts:
    """Tracks the position in a JSON text, and forbids tokens that would repeat a string in a unique array."""

    __slots__ = ("_arrays", "_escaped", "_frames", "_in_text", "_text", "_tokens")

    def __init__(self, arrays: UniqueArrays, tokens: QuotingTokens) -> None:
        self._arrays = {
            name: {
                key: tuple(sorted(map(_spelled, values))) if len(values) <= MAX_LISTED else ()
                for key, values in unique.items()
            }
            for name, unique in arrays.items()
        }
        self._tokens = tokens
        self._frames: list[_Frame] = []
        self._in_text = False
        self._escaped = False
        self._text = bytearray()

    def copy(self) -> UniqueTexts:
        """Return an independent copy at the same position."""
        found = UniqueTexts({}, self._tokens)
        found._arrays = self._arrays
        found._in_text, found._escaped, found._text = self._in_text, self._escaped, self._text.copy()
        for frame in self._frames:
            other = _Frame(frame.is_object, frame.key, frame.unique)
            other.expects_key = frame.expects_key
            other.seen = {key: seen.copy() for key, seen in frame.seen.items()}
            found._frames.append(other)
        return found

    def feed(self, tokens: Iterable[bytes]) -> None:
        """Advance by the bytes of these tokens."""
        for token in tokens:
            for byte in token:
                if self._in_text:
                    self._take_in_text(byte)
                elif byte == QUOTE:
                    self._in_text = True
                    self._text.clear()
                else:
                    self._take(byte)

    def restrict(self, mask: NDArray[np.int32]) -> None:
        """Forbid all tokens that repeat or may repeat a string. Changes `mask`, int32 [words], in place."""
        tokens = self._tokens
        mask &= tokens.without_quotes[4]  # forbids tokens that could open an array and complete two items
        if self._in_text and self._in_item():
            mask &= tokens.without_quotes[3]  # forbids tokens that could hold the rest of a name and its string
        found = self._unique_here()
        if found is None:
            return
        values, before = found
        if not self._in_text:
            mask &= tokens.without_quotes[2]
            if values:
                mask &= tokens.not_into_text[1]
            return
        mask &= tokens.without_quotes[3]
        if values:
            mask &= tokens.not_into_text[2]
        begun = bytes(self._text)
        alike = [seen for seen in before if seen.startswith(begun)]
        if len(alike) > MAX_COMPARED and not values:
            mask &= tokens.without_ending
            alike = [begun] if begun in before else []
        unused = [each for each in values if each[:-1] not in before]
        for text in (seen + b'"' for seen in alike):
            end = len(text)
            if values:  # forbid tokens after which all possible strings have already been used
                at = bisect_left(unused, text)
                shared = max((_num_shared(text, each) for each in unused[max(at - 1, 0) : at + 1]), default=0)
                end = min(max(shared, len(begun)) + 1, end)
            forbid(mask, tokens.starting(text[len(begun) : end]))

    def repeating(self, mask: NDArray[np.int32]) -> list[int]:
        """Return the allowed tokens after which the current string equals an earlier string and must continue."""
        values, before = self._unique_here() or (None, ())
        if values != ():
            return []
        begun = bytes(self._text)
        found = [token_id for seen in before for token_id in self._tokens.by_tail.get(seen, ())]
        if self._in_text:
            ends = [seen[len(begun) :] for seen in before if seen.startswith(begun) and seen != begun]
            found += [token_id for end in ends[:MAX_COMPARED] for token_id in self._tokens.equal(end)]
        return [token_id for token_id in found if allows(mask, token_id)][:MAX_COMPARED]

    @property
    def goes_on(self) -> NDArray[np.int32]:
        """Mask of the tokens that do not begin with a quote, int32 [words]."""
        return self._tokens.not_closing

    def _take_in_text(self, byte: int) -> None:
        if byte == QUOTE and not self._escaped:
            self._in_text = False
            self._end_text()
            return
        self._escaped = byte == BACKSLASH and not self._escaped
        self._text.append(byte)

    def _end_text(self) -> None:
        if not self._frames:
            return
        frame = self._frames[-1]
        if frame.expects_key:
            frame.key = json.loads(b'"' + self._text + b'"')
        else:
            found = self._unique_here()
            if found is not None:
                found[1].add(bytes(self._text))

    def _in_item(self) -> bool:
        """Whether the current object is an item of a unique array."""
        return len(self._frames) > 1 and self._frames[-1].is_object and bool(self._frames[-2].unique)

    def _unique_here(self) -> tuple[tuple[bytes, ...], set[bytes]] | None:
        """Return (allowed strings, earlier strings) if a string at this position must be unique, else None."""
        frame = self._frames[-1] if self._frames else None
        array, key = frame, None
        if frame is not None and frame.is_object:
            if frame.expects_key or not self._in_item():
                return None
            array, key = self._frames[-2], frame.key
        if array is None or key not in array.unique:
            return None
        return array.unique[key], array.seen[key]

    def _take(self, byte: int) -> None:
        frames = self._frames
        if byte in b"[{":
            key, arrays = frames[-1].key if frames else "", self._arrays
            unique = arrays.get(key, arrays.get(None, {})) if byte == 0x5B else {}
            frames.append(_Frame(byte == 0x7B, key, unique))
        elif byte in b"]}" and frames:
            frames.pop()
        elif byte in b",:" and frames:
            frames[-1].expects_key = frames[-1].is_object and byte == 0x2C


def _num_shared(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of both texts."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _spelled(text: str) -> bytes:
    """Return the string in the spelling that the grammar allows, without its opening quote."""
    return json.dumps(text, ensure_ascii=False).encode()[1:]
