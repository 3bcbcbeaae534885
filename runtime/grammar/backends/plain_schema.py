"""Rewrite JSON schemas for libraries that silently ignore unsupported keywords.

The rewritten schema contains only keywords that the library is known to enforce. For a schema with other keywords,
`Unsupported` is raised, and llguidance compiles the schema instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.grammar.schema import json_text, writer
from runtime.grammar.schema.references import Unsupported

Schema = dict[str, Any]
# Names and strings that are written without escapes in JSON and in the regular expressions of all libraries.
_PLAIN = re.compile(r"[A-Za-z0-9_ \-]{0,200}")
MAX_DEPTH = 32
VALUE_SIZE = 4  # size counted for each value in addition to its characters, for whitespace and punctuation
MAX_LIMIT = 10**9  # largest absolute value of `minimum` and `maximum`


@dataclass(frozen=True, slots=True)
class Enforced:
    """The keywords that a library enforces for each type, and the largest schema that it compiles fast enough."""

    keywords: Mapping[str, frozenset[str]]
    max_size: int  # maximum size: characters of names and constants; an array's item counts once per possible item
    text_size: int = 4  # size counted for an unrestricted string


def plain_schema(source: str, enforced: Enforced) -> tuple[Schema, int]:
    """Return the schema, rewritten with only enforced keywords, and its size.

    References are replaced by their targets, and unlisted properties are not allowed. Raises `Unsupported` for a schema
    that another library may support, and `InvalidGrammar` for an invalid schema.
    """
    written = writer.for_backend(json_text.parse(source))
    definitions = written.get("$defs", {}) if isinstance(written, dict) else {}
    builder = _Builder(enforced, definitions)
    return builder.build(written, ""), builder.size


@dataclass(slots=True)
class _Builder:
    enforced: Enforced
    definitions: Mapping[str, Any]
    # Names of the definitions that enclose the current schema, to detect recursion.
    following: list[str] = field(default_factory=list)
    depth: int = 0
    size: int = 0

    def build(self, schema: Any, pointer: str, times: int = 1) -> Schema:
        """Rewrite a schema whose value may occur `times` times in an output. `times` multiplies the counted size."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsupported("schema", pointer, "it is nested too deeply")
        found = self._build(schema, pointer, times)
        self.depth -= 1
        return found

    def _build(self, schema: Any, pointer: str, times: int) -> Schema:
        if not isinstance(schema, dict):
            raise Unsupported("schema", pointer, "it names no type")
        present = schema.keys() - {"$defs"}
        for keyword in ("$ref", "anyOf", "enum", "const"):
            if keyword in present:
                beside = sorted(present - {keyword, "type"})
                if beside or (keyword in ("$ref", "anyOf") and "type" in present):
                    raise Unsupported((beside or ["type"])[0], pointer, f"it stands beside {keyword}")
                return self._reference_or_values(keyword, schema, pointer, times)
        names = schema.get("type")
        if isinstance(names, list):
            return {"anyOf": [self._typed(name, self._about(name, schema), pointer, times) for name in names]}
        if isinstance(names, str):
            return self._typed(names, schema, pointer, times)
        raise Unsupported("type", pointer, "there is none")

    def _about(self, name: str, schema: Schema) -> Schema:
        """Return a schema with several types for only the type `name`: drop the keywords that limit the other types."""
        others = set[str]().union(
            *(_ABOUT[other] for other in _ABOUT if other != name and {other, name} != {"integer", "number"})
        )
        return {keyword: value for keyword, value in schema.items() if keyword not in others}

    def _reference_or_values(self, keyword: str, schema: Schema, pointer: str, times: int) -> Schema:
        value = schema[keyword]
        if keyword == "anyOf":
            return {
                "anyOf": [self.build(each, f"{pointer}/anyOf/{number}", times) for number, each in enumerate(value)]
            }
        if keyword == "$ref":
            name = value.removeprefix("#/$defs/")
            if name in self.following:
                raise Unsupported("$ref", pointer, "it leads back to itself")
            self.following.append(name)
            found = self.build(self.definitions[name], pointer, times)
            self.following.pop()
            return found
        values = value if keyword == "enum" else [value]
        names = schema.get("type")
        types = [names] if isinstance(names, str) else names
        if types is not None and "number" in types:
            types = [*types, "integer"]
        values = [each for each in values if types is None or _type_of(each) in types]
        for each in values:
            if not (isinstance(each, bool | None) or type(each) is int or _is_plain(each)):
                raise Unsupported(keyword, pointer, "not all of it is words, integers, booleans or null")
            self._grow(times * (VALUE_SIZE + len(json.dumps(each))), pointer)
        if not values:
            raise Unsupported(keyword, pointer, "nothing is left of it")
        return {"enum": values}

    def _typed(self, name: str, schema: Schema, pointer: str, times: int) -> Schema:
        allowed = self.enforced.keywords.get(name)
        if allowed is None:
            raise Unsupported("type", pointer, f"{name} is not known there")
        for keyword in schema.keys() - {"$defs", "type"} - allowed:
            raise Unsupported(keyword, f"{pointer}/{keyword}", "it is not enforced there")
        self._grow(times * (self.enforced.text_size if name == "string" else VALUE_SIZE), pointer)
        if name == "object":
            return self._object(schema, pointer, times)
        if name == "array":
            return self._array(schema, pointer, times)
        limits = {keyword: schema[keyword] for keyword in schema.keys() & allowed}
        if any(type(limit) is not int or abs(limit) > MAX_LIMIT for limit in limits.values()):
            raise Unsupported("minimum", pointer, f"its limits are not integers up to {MAX_LIMIT}")
        return {"type": name, **limits}

    def _object(self, schema: Schema, pointer: str, times: int) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties", False) is not False or not properties:
            raise Unsupported("additionalProperties", pointer, "there may be names that are not listed")
        if not set(required) <= properties.keys():
            raise Unsupported("required", pointer, "it names what properties does not")
        found: Schema = {}
        for name, value in properties.items():
            if not _is_plain(name) or not name:
                raise Unsupported("properties", pointer, "not all names are plain words")
            self._grow(times * len(name), pointer)
            found[name] = self.build(value, f"{pointer}/properties/{name}", times)
        return {
            "type": "object",
            "properties": found,
            "required": [name for name in found if name in required],
            "additionalProperties": False,
        }

    def _array(self, schema: Schema, pointer: str, times: int) -> Schema:
        if "items" not in schema:
            raise Unsupported("items", pointer, "there are none")
        sizes = {keyword: schema[keyword] for keyword in ("minItems", "maxItems") if keyword in schema}
        items = self.build(schema["items"], f"{pointer}/items", times * max(1, *sizes.values(), 1))
        return {"type": "array", "items": items, **sizes}

    def _grow(self, size: int, pointer: str) -> None:
        self.size += size
        if self.size > self.enforced.max_size:
            raise Unsupported("schema", pointer, "it is too large there")


_ABOUT: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "minProperties",
            "maxProperties",
        }
    ),
}


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and _PLAIN.fullmatch(text) is not None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "integer" if isinstance(value, int) else "other"
