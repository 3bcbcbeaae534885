"""Grammars as llguidance reads them: what may stand in them is checked and written here."""

from __future__ import annotations

import json
from typing import Any

from runtime.grammar import json_schema, json_text, patterns
from runtime.grammar.ebnf import ebnf_to_lark
from runtime.grammar.lark import check_lark, quoted, without_tokens
from runtime.grammar.references import Unsupported
from runtime.grammar.unique_items import UniqueArrays
from runtime.grammar_spec import WHITESPACE, Grammar, InvalidGrammar, check_whitespace

MAX_SOURCE = 512 * 1024  # characters of a grammar
MAX_CHOICES = 10_000
MAX_TAGS = 256
NO_ESCAPES_BY_NUMBER = 'nrbtf\\"'  # a name must not have two spellings: see `json_options`


def for_llguidance(
    grammar: Grammar, whitespace: str | None = None, unique: UniqueArrays | None = None
) -> str:
    """The grammar as the library's JSON text. `whitespace` is the server's, where the grammar says none.

    With `unique`, arrays of texts that must not repeat any are named there. Raises `InvalidGrammar`.
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
    """The part of a grammar for the library that its outputs' text comes from: without the tokens that it names."""
    [grammar] = json.loads(text)["grammars"]
    return without_tokens(grammar["lark_grammar"]) if "lark_grammar" in grammar else text


def part_for_llguidance(schema: Any, at: str, whitespace: str | None = None) -> str:
    """As `for_llguidance`, of what stands in a schema at a JSON pointer alone. Raises `InvalidGrammar`."""
    return _top(json_schema=_schema(schema, json_options(whitespace), {}, at=at))


def json_options(whitespace: str | None) -> dict[str, Any]:
    """How JSON is written.

    Without `\\uXXXX`: a name that a schema limits could be written in a second way, for which that limit would not
    be seen.
    """
    pattern = WHITESPACE if whitespace is None else check_whitespace(whitespace)
    options: dict[str, Any] = {"json_allowed_escapes": NO_ESCAPES_BY_NUMBER}
    if pattern:
        options["whitespace_pattern"] = pattern
    else:
        options["whitespace_flexible"] = False
    return options


def _lark(grammar: Grammar, options: dict[str, Any]) -> str:
    if grammar.kind == "regex":
        try:
            return f"start: /{patterns.full(grammar.source)}/"
        except patterns.PatternError as error:
            raise InvalidGrammar(str(error)) from None
    if grammar.kind == "choice":
        return _choice(grammar.source)
    if grammar.kind == "ebnf":
        return ebnf_to_lark(grammar.source)
    if grammar.kind == "structural_tag":
        return structural_tag_to_lark(grammar.source, options)
    room = patterns.Room()

    def write(schema: Any, rule: str) -> str:
        try:
            return json_text.dumps(_schema(schema, options, room=room))
        except Unsupported as error:
            raise error.inside(_place(grammar, rule)) from None

    return check_lark(grammar.source, write)


def _place(grammar: Grammar, rule: str) -> str:
    return grammar.places.get(rule, f"{rule}/%json")


def schemas_in(grammar: Grammar) -> list[tuple[str, Any]]:
    """The JSON schemas of a grammar that `for_llguidance` has read, and where they stand; '': it is nothing else."""
    found: list[tuple[str, Any]] = []
    if grammar.kind == "json_schema":
        found = [("", json_text.parse(grammar.source))]
    elif grammar.kind == "structural_tag":
        parts = enumerate(json_text.parse(grammar.source)["structures"])
        found = [(f"structures/{index}/schema", each.get("schema", True)) for index, each in parts]
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
    room: patterns.Room | None = None,
    at: str = "",
) -> dict[str, Any]:
    written = json_schema.for_backend(schema, unique, room, at=at)
    return {"x-guidance": options, **({"allOf": [written]} if isinstance(written, bool) else written)}


def _choice(source: str) -> str:
    texts = json_text.parse(source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidGrammar("it must be a list of texts that are not empty")
    if len(texts) > MAX_CHOICES:
        raise InvalidGrammar(f"it may hold up to {MAX_CHOICES} texts")
    return f"start: TEXT\nTEXT: {' | '.join([quoted(text) for text in dict.fromkeys(texts)])}"


def _top(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})


def structural_tag_to_lark(source: str, options: dict[str, Any]) -> str:
    """Free text in which each trigger begins one of the tags that start so: `begin`, JSON by `schema`, `end`.

    `source` is JSON: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
    """
    tag = json_text.parse(source)
    if isinstance(tag, dict) and "format" in tag:
        raise InvalidGrammar("format is not understood here; give structures and triggers")
    structures, triggers = (
        tag.get(name) if isinstance(tag, dict) else None for name in ("structures", "triggers")
    )
    if not isinstance(structures, list) or not structures or len(structures) > MAX_TAGS:
        raise InvalidGrammar(f"structures must be a list of 1 to {MAX_TAGS} objects")
    if (
        not isinstance(triggers, list)
        or not triggers
        or not all(isinstance(each, str) and each for each in triggers)
    ):
        raise InvalidGrammar("triggers must be a list of texts that are not empty")
    by_trigger: dict[str, list[str]] = {}
    room = patterns.Room()
    for index, each in enumerate(structures):
        if not isinstance(each, dict) or not isinstance(each.get("begin"), str):
            raise InvalidGrammar(f"structures/{index} must be an object with begin, schema and end")
        end = each.get("end", "")
        if not isinstance(end, str) or each.keys() - {"begin", "schema", "end"}:
            raise InvalidGrammar(f"structures/{index} must be an object with begin, schema and end")
        trigger = next((trigger for trigger in triggers if each["begin"].startswith(trigger)), None)
        if trigger is None:
            raise InvalidGrammar(f"no trigger begins structures/{index}")
        try:
            schema = json_text.dumps(_schema(each.get("schema", True), options, room=room))
        except Unsupported as error:
            raise error.inside(f"structures/{index}/schema") from None
        parts = [quoted(each["begin"][len(trigger) :]), f"%json {schema}", quoted(end)]
        by_trigger.setdefault(trigger, []).append(" ".join(part for part in parts if part != '""'))
    if any(one != other and one.startswith(other) for one in by_trigger for other in by_trigger):
        raise InvalidGrammar("a trigger must not begin with another")
    rules = [f"start: ({' | '.join(f'tag_{index}' for index in range(len(by_trigger)))})* text", "text: TEXT"]
    rules.append(r"TEXT: /(?s:.*)/")
    for index, (trigger, bodies) in enumerate(by_trigger.items()):
        rules.append(f"head_{index}[lazy]: TEXT {quoted(trigger)}")
        rules.append(f"tag_{index}: head_{index} ({' | '.join(bodies)})")
    return "\n".join(rules)
