"""Grammars designed to take much time or memory are refused, or are cheap."""

from __future__ import annotations

import json
from typing import Any

import pytest

import grammars
from runtime.grammar_spec import InvalidGrammar

NAMES = {f"p{index}": {"type": "string"} for index in range(5000)}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
PATTERNS = [{"type": "string", "pattern": f"^{'a' * n}.*b{{{n}}}"} for n in range(1, 12)]
REFUSED: dict[str, tuple[Any, Any]] = {
    "parentheses": ("regex", "(" * 30_000 + ")" * 30_000),
    "brackets": ("json_schema", "[" * 30_000),
    "nested ebnf": ("ebnf", "root ::= " + "(" * 30_000),
    "nested lark": ("lark", "start: " + "(" * 30_000),
    "a million times": ("regex", "(a{1000}){1000}"),
    "many alternatives": ("regex", "|".join(map(str, range(50_000)))),
    "ambiguous repeats": ("regex", "(a?){5000}a{5000}"),
    "a megabyte": ("json_schema", json.dumps({"enum": ["x" * 100 + str(index) for index in range(10_000)]})),
    "many names": ("json_schema", json.dumps({"properties": NAMES})),
    "remote": ("json_schema", json.dumps({"$ref": "http://127.0.0.1:9/schema.json"})),
    "many products": ("json_schema", json.dumps({"allOf": [{"anyOf": PATTERNS}] * 6})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    kind, source = REFUSED[name]
    with pytest.raises(InvalidGrammar):
        grammars.compiled(kind, source)


def test_ebnf_with_too_many_characters_is_refused_before_it_is_compiled() -> None:
    texts = " | ".join(f'"a{number:05}"' for number in range(12_000))
    for source in (f"root ::= {texts}", f'root ::= "{"a" * 500_000}"', f'root ::= "{"a" * 50_000}" | root'):
        with pytest.raises(InvalidGrammar, match=r"^its texts and classes have \d+ characters; up to 50000"):
            grammars.compiled("ebnf", source)


NESTED = "^(([a-z]{1,50}){1,50}){1,50}$"


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", {"type": "string", "pattern": NESTED}, "^pattern at /pattern: its repetitions are nested"),
        ("regex", NESTED, "^its repetitions are nested too deep"),
        (
            "json_schema",
            {"anyOf": [{"type": "object", "properties": {"a": {"const": number}}} for number in range(300)]},
            "^anyOf at /anyOf: too many alternatives are possible at one place",
        ),
        (
            "json_schema",
            {"anyOf": [{"type": "object", "properties": {"a": {"const": number}}} for number in range(3000)]},
            "^anyOf at /anyOf: too many alternatives are possible at one place",
        ),
    ],
)
def test_what_only_outputs_would_show_is_refused_when_it_is_compiled(kind: str, source: Any, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        grammars.compiled(kind, source if isinstance(source, str) else json.dumps(source))


@pytest.mark.parametrize("regex", ["(a+)+$", "(.*a.*){20}b", "(a?){100}a{100}", "a{90,9000}"])
def test_expressions_that_take_others_exponential_time_work(regex: str) -> None:
    matcher = grammars.compiled("regex", regex)
    assert grammars.accepts(matcher, "a" * 100 + ("b" if "b" in regex else ""))


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_pattern_that_is_too_long_is_refused_with_the_limit(kind: str) -> None:
    pattern = "|".join(f"{number:x}" for number in range(28_000))
    assert 128 * 1024 < len(pattern) < 256 * 1024
    with pytest.raises(InvalidGrammar, match="up to 131072 characters"):
        grammars.compiled(kind, pattern if kind == "regex" else {"pattern": pattern})


def test_the_patterns_of_a_grammar_are_bounded_together() -> None:
    pattern = "|".join(f"{number:x}" for number in range(8_000))
    schemas = [{"pattern": f"{letter}|{pattern}"} for letter in "wxyz"]
    tags = [{"begin": "<a>", "schema": schema, "end": "</a>"} for schema in schemas]
    for kind, source in (
        ("json_schema", {"anyOf": schemas}),
        ("structural_tag", {"structures": tags, "triggers": ["<"]}),
    ):
        with pytest.raises(InvalidGrammar, match="all patterns together may have up to 131072 characters"):
            grammars.compiled(kind, source)


def test_an_enum_of_ten_thousand_values_works() -> None:
    matcher = grammars.compiled("choice", [f"value {index}" for index in range(10_000)])
    assert grammars.accepts(matcher, "value 9999")
    assert not grammars.accepts(matcher, "value 10000")


def test_references_in_a_circle_leave_nothing() -> None:
    with pytest.raises(InvalidGrammar):
        grammars.compiled("json_schema", json.dumps(LOOP))


ENDLESS: dict[str, dict[str, object]] = {
    "itself": {"$ref": "#/$defs/x"},
    "nested": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]},
    "items": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}]}, "minItems": 1},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_definition_that_no_text_ends_is_refused_at_its_place(name: str) -> None:
    """An output must not come to where nothing is allowed, also where the definition is optional."""
    optional = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}
    for schema in (
        optional,
        {**optional, "required": ["a"]},
        {"anyOf": [{"$ref": "#/$defs/x"}, {"const": 1}]},
    ):
        with pytest.raises(InvalidGrammar, match=r"^\$ref at /\$defs/x: this definition requires itself"):
            grammars.compiled("json_schema", {**schema, "$defs": {"x": ENDLESS[name]}})


def test_a_matcher_that_failed_does_not_allow_the_end() -> None:
    """The library would: an output that is cut off must not look whole."""
    matcher = grammars.compiled("regex", "[ab]{3}")
    assert not matcher.consume([5])
    assert matcher.error
    assert not grammars.allowed(matcher)


def test_each_value_of_an_enum_counts_once() -> None:
    assert grammars.accepts(grammars.compiled("json_schema", {"enum": list(range(10_000))}), "9999")
    with pytest.raises(InvalidGrammar, match="more than 12000 parts"):
        grammars.compiled("json_schema", {"enum": list(range(12_000))})
