"""Check grammars, and write them in the formats of llguidance."""

from __future__ import annotations

import json
from typing import Any

from runtime.grammar.backends.structural_tags import schemas_of_tag, structural_tag_to_lark
from runtime.grammar.patterns import expressions
from runtime.grammar.schema import json_text, writer
from runtime.grammar.schema.references import Unsupported
from runtime.grammar.schema.unique_items import UniqueArrays
from runtime.grammar.syntax.ebnf import ebnf_to_lark
from runtime.grammar.syntax.lark import check_lark, quoted, without_tokens
from runtime.grammar_spec import WHITESPACE, Grammar, InvalidGrammar, check_whitespace

MAX_SOURCE = 512 * 1024  # maximum number of characters of a grammar
MAX_CHOICES = 10_000
NO_ESCAPES_BY_NUMBER = 'nrbtf\\"'  # JSON's escapes except \/ and \uXXXX; see `json_options`


def for_llguidance(grammar: Grammar, whitespace: str | None = None, unique: UniqueArrays | None = None) -> str:
    """Return the grammar in llguidance's JSON form. `whitespace` is the server's default pattern for whitespace.

    Arrays whose items must be unique are added to `unique`; if `unique` is None, they are refused. Raises
    `InvalidGrammar`.
    """
    if len(grammar.source) > MAX_SOURCE:
        raise InvalidGrammar(f"it may have up to {MAX_SOURCE} characters, not {len(grammar.source)}")
    options = json_options(grammar.whitespace if grammar.whitespace is not None else whitespace)
    if grammar.kind == "json_object":
        return _top(json_schema=_schema({"type": "object"}, options))
    if grammar.kind == "json_schema":
        if grammar.source.strip() == "$$ANY$$":
            return _top(json_schema=_schema(True, options))
        return _top(json_schema=_schema(json_text.parse(grammar.source), options, unique))
    return _top(lark_grammar=_lark(grammar, options))


def texts_of(text: str) -> str:
    """Return `text`, a result of `for_llguidance`, without references to tokens, which add no text to an output."""
    [grammar] = json.loads(text)["grammars"]
    return without_tokens(grammar["lark_grammar"]) if "lark_grammar" in grammar else text


def part_for_llguidance(schema: Any, at: str, whitespace: str | None = None) -> str:
    """Return the subschema at JSON pointer `at` as a grammar in llguidance's JSON form.

    Raises `InvalidGrammar` if the subschema is malformed or cannot be enforced.
    """
    return _top(json_schema=_schema(schema, json_options(whitespace), {}, at=at))


def json_options(whitespace: str | None) -> dict[str, Any]:
    """Return llguidance's options for JSON outputs.

    The escape `\\uXXXX` is disabled. With it, an output could spell a property name in a second way, and the property's
    schema would not apply to the value.
    """
    pattern = WHITESPACE if whitespace is None else check_whitespace(whitespace)
    options: dict[str, Any] = {"json_allowed_escapes": NO_ESCAPES_BY_NUMBER}
    if pattern:
        options["whitespace_pattern"] = pattern
    else:
        options["whitespace_flexible"] = False
    return options


def _lark(grammar: Grammar, options: dict[str, Any]) -> str:
    budget = expressions.PatternBudget()

    def write(schema: Any, rule: str) -> str:
        try:
            return json_text.dumps(_schema(schema, options, budget=budget))
        except Unsupported as error:
            raise error.inside(_place(grammar, rule)) from None

    if grammar.kind == "regex":
        try:
            return f"start: /{expressions.full(grammar.source)}/"
        except expressions.PatternError as error:
            raise InvalidGrammar(str(error)) from None
    if grammar.kind == "choice":
        return _choice(grammar.source)
    if grammar.kind == "ebnf":
        return ebnf_to_lark(grammar.source)
    if grammar.kind == "structural_tag":
        return structural_tag_to_lark(grammar.source, write)
    return check_lark(grammar.source, write)


def _place(grammar: Grammar, rule: str) -> str:
    """Return the place of a schema in a grammar, for error messages. For structural tags, `rule` is the place."""
    return rule if grammar.kind == "structural_tag" else grammar.places.get(rule, f"{rule}/%json")


def schemas_in(grammar: Grammar) -> list[tuple[str, Any]]:
    """Return (place for error messages, schema) for each JSON schema in a grammar.

    If the grammar itself is a JSON schema, its place is "".
    """
    found: list[tuple[str, Any]] = []
    if grammar.kind == "json_schema":
        found = [("", json_text.parse(grammar.source))]
    elif grammar.kind == "structural_tag":
        found = schemas_of_tag(grammar.source)
    elif grammar.kind == "lark":

        def find(schema: Any, rule: str) -> str:
            found.append((_place(grammar, rule), schema))
            return ""

        check_lark(grammar.source, find)
    return found


def _schema(
    schema: Any,
    options: dict[str, Any],
    unique: UniqueArrays | None = None,
    budget: expressions.PatternBudget | None = None,
    at: str = "",
) -> dict[str, Any]:
    written = writer.for_backend(schema, unique, budget, at=at)
    return {"x-guidance": options, **({"allOf": [written]} if isinstance(written, bool) else written)}


def _choice(source: str) -> str:
    texts = json_text.parse(source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidGrammar("it must be a list of non-empty texts")
    if len(texts) > MAX_CHOICES:
        raise InvalidGrammar(f"it may hold up to {MAX_CHOICES} texts")
    return f"start: TEXT\nTEXT: {' | '.join([quoted(text) for text in dict.fromkeys(texts)])}"


def _top(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})
