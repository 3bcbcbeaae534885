"""Complements and partitions of patterns, against Python's `re` and the jsonschema package."""

from __future__ import annotations

import json
import re
from itertools import combinations
from random import Random
from typing import Any

import jsonschema
import pytest

import grammars
from runtime.grammar.patterns import automata
from runtime.grammar.schema.references import Unsupported

PATTERNS = (
    "^a", "b$", "^[a-z]+$", r"^\d{3}-\d{4}$", "^(foo|bar)$", "[0-9]", "^.{2,5}$", "^$", r"\s", "^x-", "^[^a]*$", "a.c",
    "^(a|b|c)*$", r"\.js$", "^#[0-9a-fA-F]{6}$", r"^\S+$", "é", "ghlint|plugin", r"^[\.\,\*\\\-\s\{\}\(\)]+$", r"(\$)",
    "[^a-zA-Z0-9.,()@&' -]", '"', '[^"]', r"^\W$", r"^[^:]+:[^:]+:[0-9]+$", r"^v?\d+\.\d+$", ".*", "^a$|^b$|c$",
)  # fmt: skip
LETTERS = 'ab c-01.x"\\\n\r\té\u0663$:{}fo#Ljs\u2028'
TEXTS = [
    "",
    "a",
    "a\n",
    "foo",
    "foo\n",
    "123-4567",
    "x-",
    "abc",
    ".js",
    "#aabbcc",
    "\u0663",
    "plugin",
    "a:b:1",
    "1.2\n",
    "foobar",
    "foo1",
    "x-a",
    "bar2",
]


def texts(seed: int) -> list[str]:
    chance = Random(seed)
    return [*TEXTS, *("".join(chance.choices(LETTERS, k=chance.randint(0, 7))) for _ in range(300))]


def found(pattern: str, text: str) -> bool:
    """Match a pattern of `automata` with Python's `re`."""
    spelled = re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return re.search(spelled.replace("$", r"\Z"), text) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_outside_a_pattern_is_found_under_no_dialect(pattern: str) -> None:
    written = automata.complement(pattern, len_of_none)
    for text in texts(1):
        outside = written is not None and found(written, text)
        assert not (outside and re.search(pattern, text)), text
        if text.isascii() and not text.endswith("\n"):  # the dialects agree on these texts
            assert outside or re.search(pattern, text) or {"\r", "."} <= {*text, *pattern}, text


def len_of_none(_: object) -> None:
    """Count nothing."""


def test_patterns_that_no_text_matches_together_are_known() -> None:
    for one, other in combinations(PATTERNS, 2):
        both = [text for text in texts(2) if re.search(one, text) and re.search(other, text)]
        assert not both or automata.intersects([one, other], len_of_none), (one, other, both[:3])
    for one, other in (
        ("^a", "^b"),
        ("^[a-f]{4}$", "^$"),
        ("^[^:]+$", "^[^:]+:[0-9]+$"),
        ("^.$", "^..{2,}$"),
    ):
        assert not automata.intersects([one, other], len_of_none)


def test_parts_of_overlapping_patterns_are_apart_and_name_what_they_match() -> None:
    for patterns in (["^a", "b$"], [".*", "^a$"], ["a", "b", "c"], [r"^\w+$", r"^\d", "x"]):
        parts = automata.partition(patterns, len_of_none)
        for text in texts(3):
            inside = [indices for written, indices in parts if found(written, text)]
            assert len(inside) <= 1
            if inside and inside[0]:
                assert [*inside[0]] == [at for at, each in enumerate(patterns) if re.search(each, text)]
            if not inside:
                assert not any(re.search(each, text) for each in patterns)


def test_large_patterns_are_too_complex() -> None:
    for pattern in ("(a|b)*a(a|b){20}", "(a{50}){50}", r"^\p{L}$", "x" * 2000):
        with pytest.raises(automata.TooComplexError):
            automata.complement(pattern, len_of_none)


SCHEMAS: list[Any] = [
    {"type": "string", "not": {"pattern": "^[ab]+$"}},
    {"not": {"pattern": "a"}},
    {"type": "string", "minLength": 2, "not": {"anyOf": [{"pattern": "^a"}, {"pattern": "b$"}]}},
    {"oneOf": [{"type": "string", "pattern": "^[abf]{3}$"}, {"type": "string", "enum": [""]}, {"type": "null"}]},
    {"oneOf": [{"pattern": "^[a-f]+$"}, {"pattern": "^[A-Fa]+$"}]},
    {"oneOf": [{"pattern": "^foo"}, {"pattern": "^bar"}, {"pattern": "^x-"}]},
    {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
    {
        "oneOf": [{"$ref": "#/$defs/v"}, {"type": "string", "maxLength": 0}],
        "$defs": {"v": {"type": "string", "pattern": "^[^a]*$"}},
    },
    {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 2}}},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}, ".*": {"minimum": 2}},
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^a+$": {"type": "integer"}, r"^\d$": {"type": "string"}}},
    {"type": "object", "patternProperties": {"^.$": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^[^a]$": {"type": "integer"}}, "properties": {"b": {"minimum": 2}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_complements_are_exact(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    matcher = grammars.compiled("json_schema", schema)
    chance, names = Random(json.dumps(schema)), texts(5)
    values: list[Any] = [None, 1, True, [], {}, *texts(4)]
    values += [{chance.choice(names): chance.choice((1, 2, "x", None))} for _ in range(300)]
    values += [{name: value} for name in ("a", "b", "ab", "a\n", "\u0663", "\r") for value in (1, 2, "x")]
    counts = [0, 0]
    for value in values:
        valid, accepted = (
            validator.is_valid(value),
            grammars.accepts(matcher, json.dumps(value, ensure_ascii=False)),
        )
        assert valid or not accepted, value
        if valid and json.dumps(value).isascii() and "\\" not in json.dumps(value):
            assert accepted, value
        counts[valid] += 1
    assert min(counts) > 3, counts
    for seed in range(10):
        text = grammars.random_output(matcher, seed, 60)
        assert text is None or validator.is_valid(json.loads(text)), text


def test_random_patterns_let_nothing_through() -> None:
    chance, compiled = Random(7), 0
    for number in range(60):
        one, two = chance.sample(PATTERNS, 2)
        schema: Any = (
            {"oneOf": [{"type": "string", "pattern": one}, {"type": "string", "pattern": two}]},
            {"type": "string", "pattern": one, "not": {"pattern": two}},
            {"type": "object", "patternProperties": {one: {"type": "integer"}, two: {"minimum": 2}}},
        )[number % 3]
        try:
            matcher = grammars.compiled("json_schema", schema)
        except Unsupported:
            continue
        compiled += 1
        validator = jsonschema.Draft202012Validator(schema)
        for text in texts(number)[::5]:
            for value in (text, {text: 1}, {text: "x"}):
                if grammars.accepts(matcher, json.dumps(value, ensure_ascii=False)):
                    assert validator.is_valid(value), (schema, value)
        for seed in range(4):
            output = grammars.random_output(matcher, seed, 60)
            assert output is None or validator.is_valid(json.loads(output)), (schema, output)
    assert compiled > 30
