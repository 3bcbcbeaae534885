"""Structural tags with nested formats: which texts they allow, and which formats are refused."""

from __future__ import annotations

from typing import Any

import pytest

import grammars
from runtime.grammar_spec import InvalidGrammar

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY: dict[str, Any] = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, end: Any, content: Any = NUMBER) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [tag("<a>", "</a>"), tag("<b>", ["</b>", "|"])]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
LISTED = {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (const("hello"), ["hello"], ["", "hello!"]),
    (NUMBER, ["12"], ["a"]),
    ({"type": "regex", "pattern": "[ab]{2}"}, ["ab"], ["abc"]),
    (ANY, ["", "any <text>"], []),
    (tag("(", ")", ANY), ["()", "(a < b)"], ["(", "() and"]),
    (tag("<b>", ["</b>", "|"]), ["<b>1</b>", "<b>1|"], ["<b>1"]),
    ({"type": "sequence", "elements": [const("a"), NUMBER, const("!")]}, ["a1!"], ["a!", "1!"]),
    ({"type": "sequence", "elements": [ANY, tag("<a>", "</a>")]}, ["so: <a>1</a>"], ["<a>1</a> more", "so"]),
    ({"type": "sequence", "elements": [tag("[", "]", ANY), TRIGGERED]}, ["[x]", "[x]y<a>1</a>z"], ["x", "[x]<a>y"]),
    ({"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "3"], ["no"]),
    (TRIGGERED, ["", "text", "<a>1</a>", "x<b>2| y <a>1</a>z"], ["<a>x</a>", "<b>1</b> <a"]),
    ({**TRIGGERED, "at_least_one": True}, ["<a>1</a>", "<a>1</a> x <b>1|"], ["", "text"]),
    ({**TRIGGERED, "stop_after_first": True}, ["text", "x <a>1</a>"], ["<a>1</a>x"]),
    ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, ["<a>1</a>"], ["", "<a>1</a>x"]),
    (tag("[", "]", TRIGGERED), ["[]", "[x<a>1</a>y]"], ["[x", "[<a>x]"]),
    ({"type": "optional", "content": NUMBER}, ["", "3"], ["3a", "a"]),
    (
        {"type": "sequence", "elements": [const("a"), {"type": "star", "content": tag("<", ">", ANY)}, const("!")]},
        ["a!", "a<x>!", "a<x><y>!"],
        ["a", "a<x!"],
    ),
    (tag("[", "]", {"type": "plus", "content": const("ab")}), ["[ab]", "[abab]"], ["[]", "[a]"]),
    (LISTED, ["", "<a>1</a>", "<a>1</a>, <b>2|"], ["<a>1</a>,", "x"]),
    ({**LISTED, "at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>, <a>1</a>"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_formats_allow_their_texts(form: Any, good: list[str], bad: list[str]) -> None:
    matcher = grammars.compiled("structural_tag", {"format": form})
    assert [text for text in good if not grammars.accepts(matcher, text)] == []
    assert [text for text in bad if grammars.accepts(matcher, text)] == []


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"type": "qwen_xml_parameter"}, "format/type must be one of"),
        ({"type": "tag", "begin": "a"}, "format/content is required"),
        ({**NUMBER, "more": 1}, "format/more is not known"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "format/elements/0 is free text"),
        ({"type": "triggered_tags", "triggers": ["<x"], "tags": TAGS}, "no trigger begins format/tags/0"),
        (tag("<a>", "</a>", {"type": "json_schema", "json_schema": {"contains": {}}}), "format/content/json_schema"),
        ({"type": "regex", "pattern": "("}, "format/pattern"),
        ({"type": "star", "content": ANY}, "format/content ends with free text"),
        ({"type": "plus", "content": {"type": "or", "elements": [NUMBER, TRIGGERED]}}, "ends with free text"),
        ({"type": "optional", "content": {"type": "grammar"}}, "format/content/type must be one of"),
    ],
)
def test_what_is_wrong_is_named(form: Any, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem):
        grammars.compiled("structural_tag", {"format": form})


def test_depth_and_number_of_formats_are_limited() -> None:
    deep: Any = NUMBER
    for _ in range(20):
        deep = tag("(", ")", deep)
    wide = {"type": "or", "elements": [const(str(index)) for index in range(2000)]}
    for form in (deep, wide):
        with pytest.raises(InvalidGrammar, match="formats, nested"):
            grammars.compiled("structural_tag", {"format": form})
