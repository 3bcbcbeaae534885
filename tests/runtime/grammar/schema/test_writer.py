"""JSON schemas keyword by keyword, against the jsonschema package: accepted texts are valid, everything else is
refused.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from jsonschema.validators import validator_for
from pydantic import BaseModel, Field

import grammars
from runtime.grammar.schema.writer import UNSUPPORTED, Unsupported, for_backend
from runtime.grammar_spec import InvalidGrammar

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 100, 1.5, 0.5, -0.25, 2.0, 1e3, 12345678901,
    "", "a", "ab", "abc", "A", "7", "12", "é", "日本", "a\nb", 'q"q', "\\", "a b", "x@y.z", "2024-02-29", "2023-02-29",
    "2024-13-01", "12:30:00Z", "25:00:00Z", "2024-02-29T12:30:00Z", "1.2.3.4", "256.1.1.1", "::1", "1::2::3", "P1D",
    "http://a.b/c", "a.b-c.d", "-a", "550e8400-e29b-41d4-a716-446655440000", "abab", "foo bar",
    [], [1], ["a"], [1, "a"], [1, 2, 3], [[1], [2]], [None], ["a", "b", "c", "d"], [1, 1], [{"a": 1}],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"x1": 1, "x2": "s"}, {"A": 1}, {"é": 1},
    {"a": {"a": {"a": 1}}}, {"a": None}, {"a": 1, "c": 3, "d": 4}, {"kind": "one", "v": 1}, {"kind": "two", "v": "s"},
    {"a\nb": 1}, {'"': 1}, {"a": [1, 2]}, {"next": {"next": None}},
]  # fmt: skip

SCHEMAS: list[Any] = [
    True, {}, {"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "string"},
    {"type": "array"}, {"type": "object"}, {"type": ["string", "null"]}, {"type": ["integer", "number"]},
    {"const": 1}, {"const": "a\nb"}, {"const": {"a": 1}}, {"const": None}, {"const": 1.5}, {"const": [1, "a"]},
    {"enum": [1, "a", None, [1]]}, {"enum": [2.0, 3]}, {"type": "string", "enum": ["a", 1]}, {"enum": ["é", '"']},
    {"minimum": 2}, {"type": "integer", "minimum": -1, "maximum": 7}, {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMaximum": 1.5}, {"type": "number", "minimum": 0.5, "maximum": 2},
    {"type": "integer", "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 5}, {"type": "number", "multipleOf": 5},
    {"type": "string", "minLength": 2}, {"type": "string", "maxLength": 2}, {"minLength": 1, "maxLength": 1},
    {"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}, {"type": "string", "pattern": "b"},
    {"type": "string", "pattern": "^(ab)+$"}, {"type": "string", "pattern": r"^\d+$"}, {"pattern": r"^\w*$"},
    {"type": "string", "pattern": r"^[^\s]*$"}, {"type": "string", "pattern": r"\s"}, {"pattern": "^.$"},
    {"type": "string", "pattern": "^a|c$"}, {"type": "string", "pattern": "^(a|b).*", "maxLength": 2},
    {"type": "string", "pattern": r"\W"}, {"type": "string", "pattern": r"^\D*$"},
    {"pattern": r"^[\w.-]+@[\w-]+\.\w+$"},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri", "duration")),
    {"type": "integer", "format": "int32"}, {"type": "number", "format": "double"},
    {"format": "date", "pattern": "29$"}, {"type": "string", "format": "hostname", "maxLength": 3},
    {"items": {"type": "integer"}}, {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": False, "type": "array"},
    {"properties": {"a": {"type": "integer"}}}, {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "object", "maxProperties": 1},
    {"type": "object", "minProperties": 1}, {"type": "object", "minProperties": 2, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": True}, "minProperties": 1},
    {"properties": {"a": True, "b": {"type": "integer"}, "c": True}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "properties": {"a": True, "b": True}, "required": ["b"], "maxProperties": 1},
    {"properties": {"a": True, "b": True}, "minProperties": 2, "maxProperties": 2}, {"format": "any colour you like"},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "properties": {"a\nb": {"type": "integer"}, '"': True}, "additionalProperties": False},
    {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 7}]}, {"type": "integer", "allOf": [{"minimum": 5}]},
    {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, {"anyOf": [{"minimum": 7}, {"maximum": 1}], "type": "integer"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"oneOf": [{"const": 1}, {"const": 2}]},
    {"oneOf": [{"pattern": "^a"}, {"enum": ["b", "x y"]}]},
    {"oneOf": [{"type": "string", "pattern": "^a$"}, {"const": "a\n"}]},
    {"not": {"pattern": "a"}}, {"oneOf": [{"type": "string", "pattern": "a"}, {"enum": ["a", "b"]}]},
    {"oneOf": [{"type": "string", "pattern": "^a+b"}, {"type": "string", "pattern": "^(b|x)"}, {"type": "integer"}]},
    {"oneOf": [{"allOf": [{"required": ["a"]}, {"properties": {"a": {"const": value}}}]} for value in (1, 2)]},
    {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "one"}, "v": {"type": "integer"}}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"const": "two"}, "v": {"type": "string"}}, "required": ["kind"]},
    ]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}], "type": "object"},
    {"allOf": [{"additionalProperties": {"type": "integer"}}, {"properties": {"b": {"minimum": 2}}}], "type": "object"},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "additionalProperties": False}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}},
     "additionalProperties": False},
    {"definitions": {"a/b": {"type": "integer"}}, "$ref": "#/definitions/a~1b"},
    {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "integer"}],
     "additionalItems": False},
    {"not": {"required": ["a"]}}, {"type": "object", "not": {"required": ["a", "b"]}}, {"not": {"type": "object"}},
    {"not": {"const": "a"}}, {"type": "string", "not": {"enum": ["a", "ab", "", "é"]}},
    {"not": {"enum": [1, True, None]}},
    {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, {"not": {"minimum": 3}},
    {"type": "number", "not": {"enum": [1, 2, 5]}}, {"not": {"minLength": 2}}, {"not": {"not": {"type": "integer"}}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "one"}, "v": {"type": "integer"}}},
               {"type": "object", "properties": {"kind": {"const": "two"}}}]},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}, "type": "object"},
    {"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}, "required": ["b"]}}},
    {"type": "object", "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]},
     "else": {"required": ["c"]}},
    {"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "number", "maximum": 4.95}, {"type": "number", "exclusiveMaximum": 1},
    {"type": "number", "minimum": -0.95}, {"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)},
    {"oneOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c", "d"]}},
    {"type": "array", "uniqueItems": True, "items": {"type": "string", "maxLength": 2}, "minItems": 2},
    {"type": "array", "uniqueItems": True, "minItems": 6,
     "items": {"enum": ["ab", "abc", "a", "b", "", 'q"', "c", "d"]}},
    {"uniqueItems": True, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"const": "a"}}, "minItems": 1},
]  # fmt: skip
# Schemas for which fewer values are accepted than are valid.
NARROWED: list[Any] = [
    {"type": "array", "uniqueItems": True, "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c", "d", "e", "f"]}, "minItems": 5},
    {"oneOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False},
               {"type": "object", "properties": {"b": {}}, "additionalProperties": False}]},
    {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}]},
    {"oneOf": [{"type": "object", "properties": {"a": {"type": "integer"}}},
               {"type": "object", "patternProperties": {"^b": {"type": "integer"}}, "required": ["c"]}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"x": {"type": "integer"}},
     "not": {"$ref": "#/$defs/x", "minimum": 3}},
]  # fmt: skip


def validator_of(schema: Any) -> Any:
    cls = validator_for(schema, default=jsonschema.Draft202012Validator)
    return cls(schema, format_checker=cls.FORMAT_CHECKER)


@pytest.mark.parametrize("schema", [*SCHEMAS, *NARROWED], ids=lambda schema: json.dumps(schema)[:80])
def test_no_invalid_value_is_accepted_and_no_random_output_is_invalid(schema: Any) -> None:
    validator, matcher = validator_of(schema), grammars.compiled("json_schema", schema)
    for value in VALUES:
        if grammars.accepts(matcher, json.dumps(value, ensure_ascii=False)):
            assert validator.is_valid(value), value
    num_ended = 0
    for seed in range(12):
        text = grammars.random_output(matcher, seed, max_tokens=120)
        if text is not None:
            num_ended += 1
            assert validator.is_valid(json.loads(text)), text
    assert num_ended or "pattern" in str(schema)


NOT_AS_WRITTEN = ("1000.0", "2.0")  # integers are written without a decimal point
# The validator does not check these formats, or reads \\w like Python.
STRICTER = ("time", "date-time", "hostname", "uri", "duration", "int32", "\\\\w")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:80])
def test_valid_values_are_accepted_as_serializers_write_them(schema: Any) -> None:
    if any(name in json.dumps(schema) for name in STRICTER):
        return
    validator, matcher = validator_of(schema), grammars.compiled("json_schema", schema)
    for value in VALUES:
        if not validator.is_valid(value) or json.dumps(value) in NOT_AS_WRITTEN:
            continue
        # 2 and 2.0 differ in spelling; the order of properties may differ
        if "2.0" in json.dumps(schema) or (isinstance(value, dict) and len(value) > 1):
            continue
        for written in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            json.dumps(value, ensure_ascii=False, indent=4),
        ):
            assert grammars.accepts(matcher, written), written


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@pytest.mark.parametrize("path", ["", "/properties/a/items"])
def test_keywords_that_nothing_enforces_are_refused_by_name_and_place(keyword: str, path: str) -> None:
    wrong: Any = {keyword: {}, "then": {}}
    schema = {"properties": {"a": {"items": wrong}}} if path else wrong
    with pytest.raises(Unsupported) as caught:
        for_backend(schema)
    assert caught.value.keyword == keyword
    assert caught.value.pointer.startswith(f"{path}/")
    assert caught.value.pointer in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "strin"}, "/type"),
        ({"type": "object", "properties": {"a/b": {"format": 3}}}, "/properties/a~1b/format"),
        ({"pattern": "(?=a)"}, "/pattern"),
        ({"pattern": "\\bword"}, "/pattern"),
        ({"pattern": "(a)\\1"}, "/pattern"),
        ({"pattern": r"^[\x00-!#-\uffff]$"}, "/pattern"),
        ({"patternProperties": {"(": True}}, "/patternProperties/("),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "/$ref"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"$ref": "#name"}, "/$ref"),
        ({"multipleOf": 0.01}, "/multipleOf"),
        ({"minimum": 9007199254740993}, "/minimum"),
        ({"$defs": {"a": {"$anchor": "n"}, "b": {"$anchor": "n"}}, "$ref": "#n"}, "/$ref"),
        ({"minimum": 1e308}, "/minimum"),
        ({"const": 9007199254740993}, "/const"),
        ({"const": 1e22}, "/const"),
        ({"const": "a\x7fb"}, "/const"),
        ({"minItems": 10**9}, "/minItems"),
        ({"minLength": -1}, "/minLength"),
        ({"minLength": True}, "/minLength"),
        ({"required": True}, "/required"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["a"]}]}, "/oneOf"),
        ({"oneOf": [{"type": "string", "pattern": "^ab$"}, {"type": "string", "pattern": "^a"}]}, "/oneOf"),
        ({"not": {"contains": {"type": "integer"}}}, "/not"),
        ({"uniqueItems": True, "items": {"type": ["string", "null"]}}, "/uniqueItems"),
        ({"if": {"format": "date"}, "then": True}, "/if"),
        ({"contains": {"const": 1}}, "/contains"),
        ({"items": {"contains": {}, "minContains": 0}}, "/items/contains"),
        ({"$defs": {"x": {"$anchor": "name", "type": "integer"}}, "items": {"$ref": "#name"}}, "/items/$ref"),
        ({"items": {"$dynamicRef": "#name"}, "$dynamicAnchor": "name"}, "/items/$dynamicRef"),
        ({"items": {"$recursiveRef": "#"}, "$recursiveAnchor": True}, "/items/$recursiveRef"),
        ({"definitions": {"x": {"id": "#n"}}, "items": {"$ref": "#n"}}, "/items/$ref"),
        ({"properties": {"b": {}}, "unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"not": {"unevaluatedProperties": False}}, "/not"),
        ({"propertyNames": {"minLength": 1}}, "/propertyNames"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"not": {"minimum": 1, "exclusiveMinimum": True}}, "/not"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}, "/oneOf"),
        ({"pattern": r"^\p{L}+$"}, "/pattern"),
        ({"pattern": "^(?P<year>[0-9]+)$"}, "/pattern"),
        ({"uniqueItems": True, "items": {"type": "string", "pattern": "^[A-C]$"}}, "/uniqueItems"),
        ({"uniqueItems": True, "items": {"enum": [True, None]}}, "/uniqueItems"),
        ({"properties": {"a": {"format": "uri-template"}}}, "/properties/a/format"),
        ({"format": "color"}, "/format"),
        ({"not": {"format": "relative-json-pointer"}}, "/not"),
        (
            {
                "required": ["a"],
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "type": "object",
                "$defs": {"a": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
            },
            "/$defs/a",
        ),
        ({"if": {"required": ["a"]}, "then": {"unevaluatedItems": {}}}, "/then/unevaluatedItems"),
        ({"propertyNames": {"format": "date"}}, "/propertyNames"),
        ({"type": "object", "minProperties": 2}, "/minProperties"),
        ({"items": [3]}, "/items/0"),
        ({"anyOf": []}, "/anyOf"),
        ({"allOf": {"type": "integer"}}, "/allOf"),
        ({"const": "\ud800"}, "/const"),
        ({"enum": ["a\0b", "c"]}, "/enum/0"),
        ({"properties": {"a\x1fb": True}}, "/properties"),
        ({"allOf": [{"required": ["a", "b"]}, {"maxProperties": 1}]}, ""),
        ({"properties": dict.fromkeys("abcdefghijklmn", True), "minProperties": 6}, "/minProperties"),
        ({"minimum": "3"}, "/minimum"),
        ({"properties": {"a": 3}}, "/properties/a"),
    ],
)
def test_what_is_wrong_is_refused_at_its_place(schema: Any, pointer: str) -> None:
    with pytest.raises(Unsupported) as caught:
        for_backend(schema, {})
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        False,
    ],
    ids=json.dumps,
)
def test_a_schema_that_no_finite_value_satisfies_accepts_nothing(schema: Any) -> None:
    try:
        matcher = grammars.compiled("json_schema", schema)
    except InvalidGrammar:
        return
    for value in VALUES:
        assert not grammars.accepts(matcher, json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 1}, "1.0000001", "1.00000000000000000000001"),
        ({"exclusiveMaximum": 5}, "4.9", "4.99999999999999999999999999999"),
        ({"exclusiveMaximum": 5, "maximum": 7}, "4.99", "5.0"),
        ({"maximum": 4.95}, "4.9", "4.951"),
        ({"minimum": -4.95}, "-4.9", "-4.951"),
        ({"exclusiveMinimum": -1}, "-0.99", "-0.99999999999999999999999999999"),
        ({"exclusiveMaximum": 100}, "99.9", "99.99999999999999999999999"),
        ({"exclusiveMinimum": 100}, "100.5", "100.00000000000000001"),
        ({"maximum": 0.9999999999999999}, "0.99", "1.0"),
        ({"minimum": 100.00000000000001}, "100.1", "100"),
        ({"exclusiveMinimum": 0}, "0.5", "0.0000000000000000000000000000"),
    ],
)
def test_limits_hold_for_the_number_that_a_text_is_read_as(schema: Any, inside: str, outside: str) -> None:
    """Digits beyond the precision of a float have no effect, and short numbers near a limit are accepted."""
    schema = {"type": "number", **schema}
    matcher = grammars.compiled("json_schema", schema)
    assert validator_of(schema).is_valid(json.loads(inside))
    assert not validator_of(schema).is_valid(json.loads(outside))
    assert grammars.accepts(matcher, inside)
    assert not grammars.accepts(matcher, outside)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"required": ["a"], "maxProperties": 0}, '{"a": 1}'),
        ({"required": ["a", "b"], "maxProperties": 1}, '{"a": 1, "b": 2}'),
        ({"required": ["a"], "propertyNames": False}, '{"a": 1}'),
        ({"type": "object", "properties": {"a": True}, "minProperties": 2}, '{"x": 1, "x": 2}'),
        ({"format": "hostname"}, '"xn--X"'),
        ({"format": "idn-hostname"}, '"ab--cd.org"'),
        ({"format": "email"}, '"a@xn--7a"'),
        ({"format": "regex"}, '"a(b"'),
        ({"format": "url"}, '"no scheme"'),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_the_library_or_a_format_would_let_through_is_not_accepted(schema: Any, text: str) -> None:
    assert not grammars.accepts(grammars.compiled("json_schema", schema), text)


@pytest.mark.parametrize("pattern", ['^[^"]$', r"^[^\\]$", r'^[^"\\]$', '^q[^"]*$', "^(|q[^!-/].*)$"])
def test_a_class_without_quotes_or_backslashes_has_none(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    validator, matcher = validator_of(schema), grammars.compiled("json_schema", schema)
    for text in ('"', "\\", 'q"', "q\\", "a", "qa", "/", "é", "qé"):
        if grammars.accepts(matcher, json.dumps(text, ensure_ascii=False)):
            assert validator.is_valid(text), text
        else:
            assert not validator.is_valid(text), text


@pytest.mark.parametrize("control", [r"\v", r"\x01", r"\0", r"\x7f", "\x02", r"[\x01]", r"[\x7f-\x7f]", r"[\0\x1f]"])
def test_characters_that_no_output_holds_are_not_left_out_of_what_a_pattern_wants(control: str) -> None:
    """Other characters that the pattern allows are still accepted."""
    schema = {"type": "string", "pattern": f"^(a{control}+b|c{control}*d)$"}
    matcher = grammars.compiled("json_schema", schema)
    assert validator_of(schema).is_valid("cd")
    assert grammars.accepts(matcher, '"cd"')
    assert not grammars.accepts(matcher, '"ab"')
    with pytest.raises(InvalidGrammar, match="no value satisfies"):
        grammars.compiled("json_schema", {"type": "string", "pattern": f"^a{control}b$"})


def test_options_of_the_library_in_a_schema_have_no_effect() -> None:
    for inner in ({"unevaluatedItems": {}}, {"uniqueItems": True}, {"multipleOf": 0.01}):
        with pytest.raises(Unsupported):
            for_backend({**inner, "x-guidance": {"lenient": True}})
    matcher = grammars.compiled("json_schema", {"type": "object", "x-guidance": {"item_separator": "x"}})
    assert not grammars.accepts(matcher, '{"a":1x"b":2}')


def test_a_name_has_one_spelling() -> None:
    """With an escape, a grammar would see another name, and a parser the same name."""
    schema = {
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
        "type": "object",
    }
    matcher = grammars.compiled("json_schema", schema)
    assert grammars.accepts(matcher, '{"a":1,"b":"x"}')
    assert not grammars.accepts(matcher, '{"a":1,"\\u0061":"x"}')
    assert not grammars.accepts(matcher, '{"a":1,"a":"x"}')


def test_keywords_beside_a_recursive_reference_are_refused_at_their_place() -> None:
    inner: Any = {"type": "object", "$ref": "#/$defs/n"}
    schema = {"$defs": {"n": {"type": "object", "properties": {"next": inner}}}, "$ref": "#/$defs/n"}
    with pytest.raises(Unsupported) as caught:
        grammars.compiled("json_schema", schema)
    assert (caught.value.keyword, caught.value.pointer) == ("$ref", "/$defs/n/properties/next/$ref")
    del inner["type"]
    matcher = grammars.compiled("json_schema", schema)
    assert grammars.accepts(matcher, '{"next": {"next": {}}}')
    assert not grammars.accepts(matcher, '{"next": {"next": 1}}')


def test_references_lead_where_they_say_however_often_they_are_used() -> None:
    schema = {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "required": ["v"]}},
        "items": {"$ref": "#/$defs/tree"},
        "type": "array",
    }
    matcher = grammars.compiled("json_schema", schema)
    assert grammars.accepts(matcher, '[{"left": {"v": 1}, "v": 2}]')
    assert not grammars.accepts(matcher, '[{"left": {"w": 1}, "v": 2}]')


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Everything(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    when: datetime.datetime
    ids: dict[Literal["a", "b"], uuid.UUID] = {}
    price: Decimal = Decimal(1)
    chance: Annotated[float, Field(gt=0, lt=1)] = 0.5
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None
    path: Path | None = None
    data: bytes = b""
    pair: tuple[int, str] = (1, "x")
    kids: list[Everything] = []


def test_what_pydantic_writes_works() -> None:
    matcher = grammars.compiled("json_schema", Everything.model_json_schema())
    whole = Everything(pet=Dog(name="x"), when="2024-02-29T12:30:00Z", ids={"a": uuid.UUID(int=5)})  # pyright: ignore
    whole.kids.append(whole.model_copy(update={"pet": Cat(name="é"), "kids": []}))
    assert grammars.accepts(matcher, whole.model_dump_json())
    assert not grammars.accepts(matcher, whole.model_dump_json().replace('"dog"', '"cow"'))
    # The property does not distinguish the variants.
    assert not grammars.accepts(matcher, whole.model_dump_json().replace('"kind":"dog",', ""))
    num_ended = 0
    for seed in range(20):
        text = grammars.random_output(matcher, seed, max_tokens=400)
        if text is not None:
            num_ended += 1
            assert validator_of(Everything.model_json_schema()).is_valid(json.loads(text)), text
    assert num_ended


UNIQUE: list[Any] = [
    {"type": "string", "maxLength": 1},
    {"type": "string", "pattern": "^[a-z]{1,2}$"},
    {"enum": ["ab", "abc", "a", "b", "", 'q"', "é", "\n"]},
    {"anyOf": [{"enum": ["p", "q"]}, {"type": "string", "maxLength": 1}]},
]


@pytest.mark.parametrize("items", UNIQUE, ids=lambda items: json.dumps(items)[:80])
def test_arrays_of_texts_repeat_none_whatever_is_drawn(items: Any) -> None:
    unique = {
        "type": "array",
        "uniqueItems": True,
        "items": {"$ref": "#/$defs/item"},
        "minItems": 3,
        "maxItems": 5,
    }
    free = {"type": "array", "items": {"const": "x"}, "minItems": 2, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"free": free, "all": {"type": "array", "items": unique, "minItems": 2, "maxItems": 2}},
        "additionalProperties": False,
        "required": ["free", "all"],
        "$defs": {"item": items},
    }
    validator, matcher = validator_of(schema), grammars.compiled("json_schema", schema)
    texts = [grammars.random_output(matcher, seed, max_tokens=150) for seed in range(15)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert len(ended) >= 10
    assert all(validator.is_valid(value) for value in ended)
    assert not grammars.accepts(matcher, '{"free":["x","x"],"all":[["a","b","a"],["a","b","ab"]]}')


OBJECTS: list[Any] = [
    {"type": "object", "properties": {"n": {"type": "integer"}, "id": {"type": "string", "maxLength": 1}},
     "additionalProperties": False},
    {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-z]{1,2}$"}, "n": {}},
     "required": ["id", "n"], "additionalProperties": False},
    {"type": "object", "properties": {"id": {"enum": ["ab", "abc", "a", "b"]},
                                      "tags": {"type": "array", "items": {"const": "a"}}},
     "required": ["id"], "additionalProperties": False},
    {"anyOf": [{"type": "object", "properties": {"id": {"type": "string", "maxLength": 1}, "x": {"const": 1}},
                "additionalProperties": False},
               {"type": "object", "properties": {"id": {"type": "string", "maxLength": 1}}, "required": ["id"],
                "additionalProperties": False}]},
]  # fmt: skip


@pytest.mark.parametrize("items", OBJECTS, ids=lambda items: json.dumps(items)[:80])
def test_arrays_of_objects_repeat_none_whatever_is_drawn(items: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"all": {"type": "array", "uniqueItems": True, "items": items, "minItems": 3, "maxItems": 4}},
        "required": ["all"],
        "additionalProperties": False,
    }
    validator, matcher = validator_of(schema), grammars.compiled("json_schema", schema)
    texts = [grammars.random_output(matcher, seed, max_tokens=200) for seed in range(15)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert len(ended) >= 5
    for value in ended:
        assert validator.is_valid(value), value
        assert len({item["id"] for item in value["all"]}) == len(value["all"])
    item = '{"id":"%s","n":1}' if "pattern" in str(items) else '{"id":"%s"}'
    others = "ab" if "enum" in str(items) else "c"
    assert grammars.accepts(matcher, '{"all":[' + ",".join(item % name for name in ("a", "b", others)) + "]}")
    assert not grammars.accepts(matcher, '{"all":[' + ",".join(item % name for name in "aba") + "]}")


def test_a_long_array_of_texts_that_begin_alike_repeats_none() -> None:
    items = {"type": "string", "pattern": "^item-[0-9]+$"}
    matcher = grammars.compiled("json_schema", {"type": "array", "uniqueItems": True, "items": items})
    texts = [f"item-{number}" for number in range(60)]
    assert grammars.accepts(matcher, json.dumps(texts))
    assert not grammars.accepts(matcher, json.dumps([*texts, "item-7"]))
    assert grammars.accepts(matcher, json.dumps([*texts, "item-77"]))
