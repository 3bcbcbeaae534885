"""Check grammars in llguidance's dialect of Lark, and rewrite the JSON schemas inside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from runtime.grammar.schema import json_text
from runtime.grammar_spec import InvalidGrammar

MAX_DEPTH = 64  # maximum depth of brackets outside strings and JSON

WriteSchema = Callable[[Any, str], str]  # (schema, name of the rule that contains it) -> the schema's JSON text

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|(?:\#|//)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/[imslux]*|<[^<>\s]+>)
    |(?P<keyword>%[a-z]+)
    |(?P<open>[\[(])|(?P<close>[\])])
    |(?P<word>[A-Za-z_!?][A-Za-z0-9_-]*)
    |(?P<reference>@[A-Za-z0-9_-]+)
    |(?P<other>[^"])""",
    re.VERBOSE,
)
_BLANKS = re.compile(r"\s*")
# Keywords and options that are passed to llguidance unchanged.
_KEYWORDS = frozenset({"%ignore", "%import", "%declare", "%override", "%if", "%lark"})
_OPTIONS = frozenset({"no_forcing", "allow_initial_skip", "ignore_once"})
# Attributes of rules that are refused, because they would change sampling or remove generated tokens.
_ATTRIBUTES = frozenset({"temperature", "max_tokens", "stop"})


def check_lark(source: str, write_schema: WriteSchema) -> str:
    """Return the grammar with every `%json` schema rewritten by `write_schema`.

    Raises `InvalidGrammar` if the grammar is malformed, or uses something that is not supported.
    """
    written: list[str] = []
    at, depth, in_attributes = 0, 0, False
    word = rule = ""  # the last word outside brackets, and the current rule
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            raise InvalidGrammar(f"a text is not closed: {source[at : at + 20]!r}")
        at, text, kind = token.end(), token[0], token.lastgroup
        if kind == "open":
            in_attributes = text == "["
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidGrammar(f"its brackets are nested more than {MAX_DEPTH} deep")
        elif kind == "close":
            in_attributes = False
            depth -= 1
        elif kind == "word" and in_attributes and text in _ATTRIBUTES:
            raise InvalidGrammar(f"the attribute {text} is not supported")
        elif kind == "word" and not depth:
            word = text
        elif text == ":" and not depth:
            rule = word
        elif kind == "reference":
            raise InvalidGrammar(f"there is no other grammar {text}")
        elif kind == "keyword" and text not in _KEYWORDS:
            at, text = _with_json(source, at, text, rule, write_schema)
        written.append(text)
    return "".join(written)


def quoted(text: str) -> str:
    """Return the text as a Lark literal. Raises `InvalidGrammar` if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar("an unpaired surrogate is not valid text") from None
    return json.dumps(text).replace("\x7f", "\\u007f")


def without_tokens(source: str) -> str:
    """Return a grammar (a result of `check_lark`) without comments and without references to tokens."""
    tokens = _TOKEN.finditer(source)
    return "".join(token[0] for token in tokens if token.lastgroup != "skip" and not token[0].startswith("<"))


def _with_json(source: str, at: int, keyword: str, rule: str, write_schema: WriteSchema) -> tuple[int, str]:
    """Rewrite a keyword and the value after it. Return the index after the value, and the rewritten text."""
    begin = _BLANKS.match(source, at).end()  # pyright: ignore[reportOptionalMemberAccess]
    end = _value_end(source, begin)
    value = json_text.parse(source[begin:end])
    if keyword == "%json":
        return end, f"%json {write_schema(value, rule)}"
    if keyword == "%regex":
        return end, f"%regex {json_text.dumps(value)}"
    if keyword == "%llguidance" and isinstance(value, dict) and not value.keys() - _OPTIONS:
        return end, f"%llguidance {json_text.dumps(value)}"
    raise InvalidGrammar(f"{keyword} is not supported" + (" with these options" if keyword == "%llguidance" else ""))


def _value_end(source: str, begin: int) -> int:
    """Return the index after the JSON object or word that begins at `begin`."""
    if source[begin : begin + 1] != "{":
        word = re.compile(r"\w*").match(source, begin)
        return begin if word is None else word.end()
    depth = 0
    for token in re.compile(r'"(?:\\.|[^"\\])*"|[{}]').finditer(source, begin):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    raise InvalidGrammar("a JSON object is not closed")
