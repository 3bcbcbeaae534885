"""Convert the output constraints of the OpenAI APIs, `response_format` and `structured_outputs`, to grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar

# Keys of vLLM's `structured_outputs` -> kinds of grammars.
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
# Keys with which vLLM chooses or configures a grammar backend. Most have no effect here.
_BACKEND_KEYS = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend"})


def grammar_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of a `response_format`, or None if it allows any text.

    A schema is enforced even if `strict` is false. Raises `InvalidRequest`, whose `param` begins with
    "response_format".
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and response_format.get("schema") is None:
        return Grammar("json_object", param="response_format")
    if kind in ("json_object", "json_schema"):  # llama.cpp and Together accept "schema" with either type
        return _json_schema(response_format)
    if kind == "structural_tag":
        tag = {name: value for name, value in response_format.items() if name != "type"}
        return Grammar("structural_tag", _text(tag), param="response_format")
    if kind == "grammar":
        source = response_format.get("grammar")
        if not isinstance(source, str):
            raise InvalidRequest("response_format.grammar must be a string.", param="response_format.grammar")
        return Grammar("ebnf", source, param="response_format.grammar")
    raise InvalidRequest(
        'response_format.type must be "text", "json_object", "json_schema", "structural_tag" or "grammar".',
        param="response_format.type",
    )


def structured_outputs_of(value: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of vLLM's `structured_outputs`.

    Raises `InvalidRequest`, whose `param` begins with "structured_outputs".
    """
    if value is None:
        return None
    options = {name: item for name, item in value.items() if item is not None and item is not False}
    whitespace = options.pop("whitespace_pattern", None)
    kinds = [name for name in options if name in _STRUCTURED]
    unknown = options.keys() - _STRUCTURED.keys() - _BACKEND_KEYS
    if unknown or len(kinds) != 1 or not (whitespace is None or isinstance(whitespace, str)):
        raise InvalidRequest(
            f"structured_outputs must hold exactly one of {', '.join(_STRUCTURED)}, and optionally whitespace_pattern.",
            param="structured_outputs",
        )
    [name] = kinds
    if options.keys() & {"disable_any_whitespace"}:
        whitespace = ""
    if options.keys() & {"disable_additional_properties"}:
        raise InvalidRequest(
            "structured_outputs.disable_additional_properties is not supported; set additionalProperties "
            "in the schema.",
            param="structured_outputs.disable_additional_properties",
        )
    param = f"structured_outputs.{name}"
    kind, source = _STRUCTURED[name], options[name]
    if kind == "json_object":
        return Grammar("json_object", whitespace=whitespace, param=param)
    if not isinstance(source, str) and kind in ("regex", "ebnf"):
        raise InvalidRequest(f"{param} must be a string.", param=param)
    text = source if isinstance(source, str) else _text(source)
    return Grammar(kind, text, whitespace=whitespace, param=param)  # pyright: ignore[reportArgumentType]


def _json_schema(response_format: Mapping[str, Any]) -> Grammar:
    """Return the grammar of {"json_schema": {"name", "schema", "strict"}}, or of "schema" next to "type"."""
    param = "response_format.json_schema"
    named = response_format.get("json_schema")
    if named is None and "schema" in response_format:
        named = response_format
    if not isinstance(named, Mapping) or "schema" not in named:
        raise InvalidRequest(f"{param} must be an object with the key schema.", param=param)
    return Grammar("json_schema", _schema(named["schema"], param), param=param)


def _schema(schema: Any, param: str) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param} must be an object or a string.", param=param)
    return _text(schema)


def _text(value: Any) -> str:
    return orjson.dumps(value).decode()
