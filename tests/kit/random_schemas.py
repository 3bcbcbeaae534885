"""Random JSON schemas, keyword by keyword, and instances that nearly match."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

FORMATS = {
    "date": ["2024-02-29", "2023-02-30", "0000-01-01"],
    "date-time": ["2024-02-29T12:30:00Z", "2024-02-30T12:30:00Z", "2024-01-01T12:30:00.123+02:00"],
    "email": ["a@b.c", "a@b", "@"],
    "ipv4": ["1.2.3.4", "1.2.3", "256.1.1.1", "01.2.3.4"],
    "ipv6": ["::1", "1::2::3", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "::ffff:1.2.3"],
    "uuid": ["550e8400-e29b-41d4-a716-446655440000", "550e8400e29b41d4a716446655440000"],
}
PATTERNS = (
    "^a", "b$", "^[a-z]+$", r"^\d{3}-\d{4}$", "^(foo|bar)$", "[0-9]", "^.{2,5}$", "^$", r"\s", "^x-", "^[^a]*$",
    "a.c", "^(a|b|c)*$", r"\.js$", r"^v?\d+\.\d+\.\d+$", "^#[0-9a-fA-F]{6}$", r"^\S+$", "é",
)  # fmt: skip
NAMES = (
    "a",
    "b",
    "c",
    "name",
    "kind",
    "x-1",
    "é",
    "$ref_",
    "a b",
    "id",
    "type",
    "v1",
    'q"q',
    "ab",
    "abc",
    "",
)
SCALARS = (
    None, True, False, 0, 1, -1, 2, 1.5, 10, 100, -0.5, 4.9, "a", "b", "foo", "é", 'q"', "", "1", "a\nb", "\\", "日本",
)  # fmt: skip
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class SchemaWriter:
    """Generates schemas from one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._definitions = [f"D{index}" for index in range(self.chance.choice((0, 0, 1, 2)))]

    def schema(self) -> dict[str, Any]:
        found = self._below(3)
        if self._definitions:
            found = {**found, "$defs": {name: self._below(2) for name in self._definitions}}
        return found

    def _happens(self, share: float) -> bool:
        return self.chance.random() < share

    def _below(self, depth: int) -> dict[str, Any]:
        chance, at = self.chance, self.chance.random()
        if self._definitions and at < 0.1:
            return {"$ref": f"#/$defs/{chance.choice(self._definitions)}", "description": "x"}
        if at < 0.13:
            return chance.choice(({}, {"title": "anything"}))
        if at < 0.2:
            return {"enum": [chance.choice(SCALARS) for _ in range(chance.randint(1, 5))]}
        if at < 0.24:
            return {"const": value(chance, 1)}
        if depth and at < 0.42:
            return self._combined(depth)
        if at < 0.48:
            return {"anyOf": [self._below(depth - 1), {"type": "null"}], "default": None, "title": "Optional"}
        return self._typed(depth)

    def _combined(self, depth: int) -> dict[str, Any]:
        kind = self.chance.choice(("anyOf", "anyOf", "allOf", "oneOf", "tagged", "not", "if"))
        beside = self._typed(depth - 1) if self._happens(0.3) else {}
        if kind == "tagged":
            options = [self._tagged(name, depth) for name in ("one", "two")]
            return {"oneOf": options, "discriminator": {"propertyName": "kind"}}
        if kind == "not":
            return {**beside, "not": self._below(0)}
        if kind == "if":
            condition = {"properties": {"a": {"const": self.chance.choice(SCALARS)}}, "required": ["a"]}
            return {"type": "object", "if": condition, "then": self._below(0), "else": {"required": ["b"]}}
        return {**beside, kind: [self._below(depth - 1) for _ in range(self.chance.randint(1, 3))]}

    def _tagged(self, name: str, depth: int) -> dict[str, Any]:
        properties = {"kind": {"const": name, "default": name}, "v": self._below(depth - 1)}
        return {
            "type": "object",
            "properties": properties,
            **({"required": ["kind"]} if self._happens(0.5) else {}),
        }

    def _typed(self, depth: int) -> dict[str, Any]:
        kinds = self.chance.choice(
            [*([each] for each in TYPES), ["string"], ["object"], ["object"], ["integer", "string"]]
        )
        found: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds} if self._happens(0.95) else {}
        for kind in kinds:
            if kind in ("integer", "number"):
                found |= self._number()
            elif kind == "string":
                found |= self._string()
            elif kind == "array" and depth > 0:
                found |= self._array(depth)
            elif kind == "object" and depth > 0:
                found |= self._object(depth)
        return found

    def _number(self) -> dict[str, Any]:
        chance, found = self.chance, {}
        for keyword in chance.sample(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), chance.randint(0, 2)
        ):
            low = keyword.endswith("inimum")
            found[keyword] = chance.choice((-100, -1, 0, 1, 0.5, -2.55, 3) if low else (0, 1, 5, 99, 0.5, 7.75, 4.95))
        return {**found, **({"multipleOf": chance.choice((1, 2, 5, 0.5, 7))} if self._happens(0.15) else {})}

    def _string(self) -> dict[str, Any]:
        chance = self.chance
        every = {
            "minLength": chance.choice((0, 1, 5)),
            "maxLength": chance.choice((3, 8, 64)),
            "pattern": chance.choice(PATTERNS),
            "format": chance.choice(tuple(FORMATS)),
        }
        return {keyword: every[keyword] for keyword in chance.sample(tuple(every), chance.choice((0, 1, 1, 2)))}

    def _array(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._happens(0.8):
            found["items"] = self._below(depth - 1)
        if self._happens(0.25):
            found["prefixItems"] = [self._below(depth - 1) for _ in range(self.chance.randint(1, 3))]
        for keyword, limit in (("minItems", 3), ("maxItems", 5)):
            if self._happens(0.3):
                found[keyword] = self.chance.randint(0, limit)
        return {**found, **({"uniqueItems": True} if self._happens(0.05) else {})}

    def _object(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        names = chance.sample(NAMES, chance.randint(0, 4))
        found: dict[str, Any] = {"properties": {name: self._below(depth - 1) for name in names}}
        if self._happens(0.6):
            found["required"] = [name for name in names if self._happens(0.6)]
        if self._happens(0.5):
            found["additionalProperties"] = chance.choice((False, False, True, self._below(depth - 1)))
        if self._happens(0.15):
            found["patternProperties"] = {chance.choice(("^x", "^a", r"\d", "e$")): self._below(depth - 1)}
        if self._happens(0.1):
            found[chance.choice(("minProperties", "maxProperties"))] = chance.randint(1, 3)
        if self._happens(0.06):
            found["propertyNames"] = chance.choice(({"pattern": "^[a-z]"}, {"enum": ["a", "b"]}, {"maxLength": 3}))
        if self._happens(0.06):
            found["dependentRequired"] = {chance.choice(NAMES): [chance.choice(NAMES)]}
        return found


def value(chance: random.Random, depth: int = 2) -> Any:
    at = chance.random()
    if depth <= 0 or at < 0.55:
        return chance.choice(SCALARS)
    if at < 0.75:
        return [value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(NAMES): value(chance, depth - 1) for _ in range(chance.randint(0, 3))}


def mutated(chance: random.Random, found: Any, depth: int = 0) -> Any:
    """Return a slightly changed value."""
    at = chance.random()
    if at < 0.15 or depth > 4 or found is None or isinstance(found, bool):
        return value(chance)
    if isinstance(found, dict | list) and found:
        changed = found.copy()
        key = chance.choice(list(changed)) if isinstance(changed, dict) else chance.randrange(len(changed))
        if at < 0.4:
            del changed[key]
        elif at < 0.6 and isinstance(changed, dict):
            changed[chance.choice(NAMES)] = value(chance, 1)
        elif at < 0.6 and isinstance(changed, list):
            changed.append(chance.choice(changed))
        else:
            changed[key] = mutated(chance, changed[key], depth + 1)
        return changed
    if isinstance(found, str):
        place = chance.randint(0, len(found))
        return (
            found[:place] + chance.choice(("Z", "9", " ", "-", "@", '"', "\\", "日", "")) + found[place + (at < 0.6) :]
        )
    if isinstance(found, int | float):
        return chance.choice((found + 1, found - 1, -found, found + 0.5, str(found), 10 * found))
    return value(chance)


def instances(chance: random.Random, schema: Any, near: list[Any]) -> Iterator[Any]:
    """Return `near` itself, similar values, the constants of the schema, and texts of its formats."""
    yield from near
    for found in near:
        for _ in range(3):
            yield mutated(chance, found)
    yield from _constants(schema)
    for _ in range(6):
        yield value(chance)
    for name, texts in FORMATS.items():
        if name in json.dumps(schema):
            yield from texts


def _constants(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield from schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ()
        if "const" in schema:
            yield schema["const"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _constants(part)
