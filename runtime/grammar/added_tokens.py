"""Added tokens such as <think> and <|im_end|> where grammars write them as text.

llguidance takes special tokens, and all other added ones of the form <...>, for tokens that no text holds. Where a
grammar leaves no choice but their text it forces the token all the same, and refuses it then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from runtime.tokenizer.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_FORMS = (re.compile(r"<[^<>]+>"), re.compile(r"\[[^\[\]\s]+\]"))
# A character as `patterns.escape` writes it, within JSON too. Only the first of many backslashes begins one: tried at
# each of them, a text of nothing else would take the square of its length.
_CHARACTER = r"(?<!\\)\\+x\{(10[0-9a-f]{4}|[0-9a-f]{1,5})\}"
_ESCAPED = re.compile(_CHARACTER)
_ESCAPED_TEXT = re.compile(f"(?:{_CHARACTER}|[0-9A-Za-z])+")
_BY_NUMBER = re.compile(r"(?<!\\)\\+u([0-9a-f]{4})")  # as JSON is written


class AddedTokens(NamedTuple):
    """Those that the library does not see as text."""

    ids: Mapping[str, int]  # of those that texts may hold, by their text
    spelled: Mapping[int, list[int]]  # the same text in tokens that the library sees as text
    special: Mapping[str, int]  # those that end outputs, or are not shown in them


def added_tokens(vocabulary: LLTokenizer, table: TokenBytes, special_ids: Iterable[int]) -> AddedTokens:
    """Of the vocabulary that the library holds; `table`: the tokens' bytes as outputs show them."""
    special_ids = frozenset(special_ids)
    ids, spelled, special = dict[str, int](), dict[int, list[int]](), dict[str, int]()
    for token_id in filter(vocabulary.is_special_token, range(vocabulary.vocab_size)):
        text = table.rest[token_id]
        if text in (b"", b"\xff"):  # one that is not used
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
    """What a grammar, as the library reads it, writes of the forms <...> and [...], whether they are tokens or not."""
    written = [_BY_NUMBER.sub(_character, text)]
    for found in _ESCAPED_TEXT.finditer(text):
        if "{" in found[0]:
            written.append(_ESCAPED.sub(_character, found[0]))
    return {mark for each in written for form in _FORMS for mark in form.findall(each)}


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))
