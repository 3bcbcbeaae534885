"""Refusals by the library name the keyword and its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

import grammars
from runtime.grammar.schema import refusals
from runtime.grammar.schema.references import Unsupported

NOTHING = {"allOf": [{"type": "string"}, {"type": "integer"}]}
MANY_WORDS = {"type": "string", "pattern": "^([a-z][0-9])+$", "minLength": 10_000}
COUNTED_APART = {
    "properties": {"a": {}, "b": {}, "c": {}},
    "allOf": [{"maxProperties": 2}, {"properties": {"d": {}}}],
}


def nested(part: Any) -> dict[str, Any]:
    others = {f"p{index}": {"type": "string", "description": "x"} for index in range(10)}
    below = {"type": "object", "properties": {**others, "a/b": {"items": {"$ref": "#/$defs/d"}}}}
    return {"anyOf": [{"type": "null"}, below], "$defs": {"other": {}, "d": {"properties": {"x": part}}}}


def needed(part: Any) -> dict[str, Any]:
    properties = {"a": {"type": "array", "items": part, "minItems": 1}, "b": NOTHING}
    return {"type": "object", "required": ["a"], "properties": properties}


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        (NOTHING, "schema", ""),
        (needed(NOTHING), "schema", "/properties/a/items"),
        ({"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": NOTHING}}, "schema", "/definitions/n"),
        (nested(MANY_WORDS), "pattern", "/$defs/d/properties/x/pattern"),
        (MANY_WORDS, "pattern", "/pattern"),
        (needed(COUNTED_APART), "minProperties or maxProperties", "/properties/a/items"),
    ],
)
def test_it_is_named_by_keyword_and_place(
    schema: Any, keyword: str, pointer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MAX_S", 60)  # a busy machine needs longer
    with pytest.raises(Unsupported) as caught:
        grammars.compiled("json_schema", schema)
    assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)


def test_schemas_in_tags_and_in_lark_have_places_too() -> None:
    tags = [{"begin": "<a>", "schema": {}, "end": ""}, {"begin": "<b>", "schema": needed(NOTHING), "end": ""}]
    lark = f'start: a | word\nword[lazy]: /x+/\na: "y" %json {json.dumps(needed(NOTHING))}\n'
    for kind, source, place in (
        ("structural_tag", {"structures": tags, "triggers": ["<"]}, "structures/1/schema"),
        ("lark", lark, "a/%json"),
    ):
        with pytest.raises(Unsupported, match=f"^schema at {place}/properties/a/items: no value satisfies it"):
            grammars.compiled(kind, source)


def test_what_is_refused_before_the_library_sees_it_has_a_place_in_tags_and_in_lark() -> None:
    wrong = {"properties": {"a": {"unevaluatedItems": False}}}
    tags = [{"begin": "<a>", "schema": {}, "end": ""}, {"begin": "<b>", "schema": wrong, "end": ""}]
    for kind, source, place in (
        ("structural_tag", {"structures": tags, "triggers": ["<"]}, "structures/1/schema"),
        ("lark", f"start: a\na: %json {json.dumps(wrong)}", "a/%json"),
    ):
        with pytest.raises(Unsupported, match=f"at {place}/properties/a/unevaluatedItems: "):
            grammars.compiled(kind, source)


def test_the_search_for_a_place_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search is cut short, a part around the cause is named."""
    schema = {"anyOf": [{"maxLength": length} for length in range(400)] + [MANY_WORDS]}
    tried: list[str] = []

    def refusal(_: Any, pointer: str) -> str | None:
        tried.append(pointer)
        return "Unable to determine if regex is empty" if pointer.endswith("/400") else None

    error = refusals.placed([("", schema)], "Unable to determine if regex is empty", refusal)
    assert isinstance(error, Unsupported)
    assert (error.keyword, error.pointer) == ("pattern", "")
    assert len(tried) == refusals.MAX_TRIES - 1
    monkeypatch.setattr(refusals, "MAX_TRIES", 1000)
    monkeypatch.setattr(refusals, "MAX_S", float("inf"))
    error = refusals.placed([("", schema)], "Unable to determine if regex is empty", refusal)
    assert isinstance(error, Unsupported)
    assert error.pointer == "/anyOf/400/pattern"


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, tried = 0.0, list[str]()

    def refusal(_: Any, pointer: str) -> str | None:
        nonlocal now_s
        now_s += refusals.MAX_S / 4
        tried.append(pointer)
        return None

    monkeypatch.setattr(refusals.time, "perf_counter", lambda: now_s)
    refusals.placed([("", {"allOf": [{}] * 100})], "schema too large", refusal)
    assert len(tried) == 4
