"""What the OpenAI APIs say about the shape of an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar

# vLLM's `structured_outputs`: its keys and ours. What else it may hold is about backends, and changes no output.
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
_ABOUT_BACKENDS = frozenset(
    {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend"}
)


def grammar_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of a `response_format`; None where any text will do.

    A schema is enforced whether `strict` is true or not. Raises `InvalidRequest` below "response_format".
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and response_format.get("schema") is None:
        return Grammar("json_object", param="response_format")
    if kind in ("json_object", "json_schema"):  # llama.cpp and Together have a schema beside either word
        return _json_schema(response_format)
    if kind == "structural_tag":
        tag = {name: value for name, value in response_format.items() if name != "type"}
        return Grammar("structural_tag", _text(tag), param="response_format")
    raise InvalidRequest(
        'response_format.type must be "text", "json_object", "json_schema" or "structural_tag".',
        param="response_format.type",
    )


def structured_outputs_of(value: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`. Raises `InvalidRequest` below it."""
    if value is None:
        return None
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    whitespace = given.pop("whitespace_pattern", None)
    kinds = [name for name in given if name in _STRUCTURED]
    unknown = given.keys() - _STRUCTURED.keys() - _ABOUT_BACKENDS
    if unknown or len(kinds) != 1 or not (whitespace is None or isinstance(whitespace, str)):
        raise InvalidRequest(
            f"structured_outputs must hold one of {', '.join(_STRUCTURED)}, and perhaps whitespace_pattern.",
            param="structured_outputs",
        )
    [name] = kinds
    if given.keys() & {"disable_any_whitespace"}:
        whitespace = ""
    if given.keys() & {"disable_additional_properties"}:
        raise InvalidRequest(
            "structured_outputs.disable_additional_properties is not supported; write additionalProperties "
            "into the schema.",
            param="structured_outputs.disable_additional_properties",
        )
    param = f"structured_outputs.{name}"
    kind, source = _STRUCTURED[name], given[name]
    if kind == "json_object":
        return Grammar("json_object", whitespace=whitespace, param=param)
    if not isinstance(source, str) and kind in ("regex", "ebnf"):
        raise InvalidRequest(f"{param} must be a string.", param=param)
    text = source if isinstance(source, str) else _text(source)
    return Grammar(kind, text, whitespace=whitespace, param=param)  # pyright: ignore[reportArgumentType]


def _json_schema(response_format: Mapping[str, Any]) -> Grammar:
    """As OpenAI has it, {"json_schema": {"name", "schema", "strict"}}, or with "schema" beside "type"."""
    param = "response_format.json_schema"
    named = response_format.get("json_schema")
    if named is None and "schema" in response_format:
        named = response_format
    if not isinstance(named, Mapping) or "schema" not in named:
        raise InvalidRequest(f"{param} must be an object that holds the schema.", param=param)
    return Grammar("json_schema", _schema(named["schema"], param), param=param)


def _schema(schema: Any, param: str) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param} must be an object or a text.", param=param)
    return _text(schema)


def _text(value: Any) -> str:
    return orjson.dumps(value).decode()
