"""Added tokens (for example <think> and <|im_end|>) whose text occurs in a grammar.

llguidance treats special tokens, and other added tokens of the form <...>, as tokens without text. If a grammar
requires the text of such a token, llguidance's mask allows only this token, but llguidance then refuses the token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from runtime.tokenizer.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_FORMS = (re.compile(r"<[^<>]+>"), re.compile(r"\[[^\[\]\s]+\]"))
# A character escaped by `expressions.escape`; inside JSON, the backslash is doubled. The lookbehind lets a match start
# only at the first of several backslashes. Without it, a long row of backslashes would take quadratic time.
_CHARACTER = r"(?<!\\)\\+x\{(10[0-9a-f]{4}|[0-9a-f]{1,5})\}"
_ESCAPED = re.compile(_CHARACTER)
_ESCAPED_TEXT = re.compile(f"(?:{_CHARACTER}|[0-9A-Za-z])+")
_BY_NUMBER = re.compile(r"(?<!\\)\\+u([0-9a-f]{4})")  # a JSON escape such as \u003c


class AddedTokens(NamedTuple):
    """Added tokens that llguidance does not treat as text."""

    ids: Mapping[str, int]  # text -> id, for tokens that may occur in an output
    spelled: Mapping[int, list[int]]  # id in `ids` -> ordinary tokens with the same text
    special: Mapping[str, int]  # text -> id, for special and end-of-sequence tokens


def added_tokens(vocabulary: LLTokenizer, table: TokenBytes, special_ids: Iterable[int]) -> AddedTokens:
    """Return the added tokens in llguidance's vocabulary. `table` has the bytes that each token adds to an output."""
    special_ids = frozenset(special_ids)
    ids, spelled, special = dict[str, int](), dict[int, list[int]](), dict[str, int]()
    for token_id in filter(vocabulary.is_special_token, range(vocabulary.vocab_size)):
        text = table.rest[token_id]
        if text in (b"", b"\xff"):  # an unused id
            continue
        mark = text.decode(errors="replace")
        if token_id in special_ids:
            special[mark] = token_id
            continue
        parts = [*vocabulary.tokenize_bytes(text[:1]), *vocabulary.tokenize_bytes(text[1:])]
        if not any(map(vocabulary.is_special_token, parts)) and vocabulary.decode_bytes(parts) == text:
            ids[mark], spelled[token_id] = token_id, parts
    return AddedTokens(ids, spelled, special)


def marks_in(text: str) -> set[str]:
    """Return all texts of the form <...> or [...] in a grammar for llguidance, whether or not they are tokens."""
    written = [_BY_NUMBER.sub(_character, text)]
    for found in _ESCAPED_TEXT.finditer(text):
        if "{" in found[0]:
            written.append(_ESCAPED.sub(_character, found[0]))
    return {mark for each in written for form in _FORMS for mark in form.findall(each)}


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))
