"""References of a JSON schema: they lead into the schema itself, or nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from runtime.grammar_spec import InvalidGrammar

MAX_COMPARED = 100_000  # looks behind references, for comparing schemas and for their opposites
MAX_STEPS = 16  # of references that lead to references alone
MAX_LOOKS = 100  # at definitions and alternatives, for the types of one schema
MAX_PASSES = 20  # over definitions that may lead to themselves
LOOKS_BETWEEN_PAUSES = 64
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class Unsupported(InvalidGrammar):
    """A keyword is malformed or cannot be enforced; names it and where it stands."""

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        super().__init__(f"{keyword} at {pointer or '/'}: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason

    def inside(self, place: str) -> Unsupported:
        """The same, of a schema that stands at `place` in something larger."""
        return Unsupported(self.keyword, place + self.pointer, self.reason)


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class References:
    """Of one schema: the places that it leads to, each named once, and those that are still to be written."""

    def __init__(self, root: Any) -> None:
        found = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self._root = root
        self._root_id = found.rstrip("#") if isinstance(found, str) else ""
        self._names: dict[str, str] = {}  # of the definitions, by the pointers to them
        self._pending: list[str] = []
        self._num_compared = 0
        self._anchors: dict[str, list[str]] | None = None  # pointers, by names

    def name(self, reference: Any, pointer: str) -> str:
        """What its target is called among the definitions. Raises `Unsupported`."""
        target = self.target(reference, pointer)
        self.resolve(target)
        if target not in self._names:
            self._names[target] = f"d{len(self._names)}"
            self._pending.append(target)
        return self._names[target]

    def definitions(self, write: Callable[[Any, str], Any]) -> dict[str, Any]:
        """All that is named, and named meanwhile, by names; `write` is given what stands there and its pointer."""
        found: dict[str, Any] = {}
        while self._pending:
            pointer = self._pending.pop()
            found[self._names[pointer]] = write(self.resolve(pointer), pointer)
        return found

    def peek(self, schema: Any) -> Any:
        """What a reference alone leads to, for comparing: 16 steps at most."""
        self._num_compared += 1
        if self._num_compared > MAX_COMPARED:
            raise Unsupported("schema", "", "there is too much in it to compare")
        if self._num_compared % LOOKS_BETWEEN_PAUSES == 0:
            time.sleep(0)
        for _ in range(MAX_STEPS):
            if not (isinstance(schema, dict) and "$ref" in schema):
                break
            try:
                schema = self.resolve(self.target(schema["$ref"], ""))
            except Unsupported:
                break
        return schema

    def resolve(self, pointer: str) -> Any:
        """What a JSON pointer leads to. Raises `Unsupported`."""
        found = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and len(key) < 8 and int(key) < len(found):
                found = found[int(key)]
            else:
                raise Unsupported(
                    "$ref", f"/{pointer.lstrip('/')}", "there is nothing in the schema at this place"
                )
        return found

    def target(self, reference: Any, pointer: str) -> str:
        """The pointer that a reference at `pointer` holds. Raises `Unsupported`."""
        if not isinstance(reference, str):
            raise Unsupported("$ref", pointer, "it must be a string")
        if self._root_id and reference.startswith(self._root_id + "#"):
            reference = reference[len(self._root_id) :]
        if reference in ("#", "#/"):
            return ""
        if not reference.startswith("#/"):
            found = self._named(reference[1:]) if reference.startswith("#") else []
            if len(found) != 1:
                raise Unsupported(
                    "$ref", pointer, "only references into the schema itself (#/...) are followed"
                )
            return found[0]
        try:
            return unquote(reference[1:], errors="strict") if "%" in reference else reference[1:]
        except UnicodeDecodeError:
            raise Unsupported("$ref", pointer, "its escapes are no text") from None

    def _named(self, name: str) -> list[str]:
        """The pointers to what has this name: an $anchor or $dynamicAnchor, or an $id or id such as #name."""
        if self._anchors is None:
            self._anchors = {}
            pending: list[tuple[str, Any]] = [("", self._root)]
            while pending:
                pointer, found = pending.pop()
                if isinstance(found, dict):
                    for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                        value = found.get(keyword)
                        if isinstance(value, str) and (keyword.endswith("nchor") or value.startswith("#")):
                            self._anchors.setdefault(value.lstrip("#"), []).append(pointer)
                    parts = ((escaped(key), item) for key, item in found.items())
                    pending += [(f"{pointer}/{key}", item) for key, item in parts]
                elif isinstance(found, list):
                    pending += [(f"{pointer}/{index}", item) for index, item in enumerate(found)]
        return self._anchors.get(name, [])


def endless(definitions: Mapping[str, Any], pause: Callable[[], None]) -> set[str]:
    """The names of those definitions, written for the backend, that no text matches, as they lead to themselves.

    An output would come to a place where nothing is allowed, or go on for ever. `pause` is called for each look.
    """
    ending: set[str] = set()
    open_ = list(definitions)[::-1]  # the innermost come first
    for _ in range(MAX_PASSES):
        found = [name for name in open_ if _ends(definitions[name], ending, pause)]
        if not found:
            return set(open_)
        ending.update(found)
        open_ = [name for name in open_ if name not in ending]
    return set()


def without(schema: Any, names: Collection[str]) -> Any:
    """The schema, written for the backend, with false where it refers to one of these definitions."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") in names:
        return False
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs"):
            found[keyword] = {name: without(part, names) for name, part in value.items()}
        elif keyword in ("items", "additionalProperties"):
            found[keyword] = without(value, names)
        elif keyword in ("anyOf", "allOf", "prefixItems"):
            found[keyword] = [without(part, names) for part in value]
    return found


def written_parts(schemas: Collection[Any], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Schemas written for the backend and those in them, each before its own: it may be changed before the next."""
    pending = list(schemas)
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        pause()
        yield part
        for keyword in ("properties", "patternProperties"):
            pending += part.get(keyword, {}).values()
        pending += [part[keyword] for keyword in ("items", "additionalProperties") if keyword in part]
        for keyword in ("anyOf", "allOf", "prefixItems"):
            pending += part.get(keyword, ())


def drop_what_references_say(parts: Iterator[dict[str, Any]], definitions: Mapping[str, Any]) -> None:
    """Take out of `written_parts` types that the references beside them have already.

    The library refuses references in a circle with anything beside them.
    """
    for part in parts:
        if part.get("additionalProperties") in ({}, True):
            del part["additionalProperties"]
        if "type" in part and ("$ref" in part or "anyOf" in part):
            rest = {keyword: part[keyword] for keyword in ("$ref", "anyOf", "allOf") if keyword in part}
            looks = iter(range(MAX_LOOKS))
            if _written_types(rest, definitions, part, looks) <= _named_types(part["type"]):
                del part["type"]


def definition_of(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """What a `$ref` that is written for the backend leads to."""
    return definitions[schema["$ref"].removeprefix("#/$defs/")]


def _written_types(
    schema: Any, definitions: Mapping[str, Any], without: Any, looks: Iterator[int]
) -> frozenset[str]:
    """The types that a schema allows, where `without` says nothing of its own; all of them without `looks`."""
    if not isinstance(schema, dict) or next(looks, None) is None:
        return _TYPES
    allowed = _named_types(schema["type"]) if "type" in schema and schema is not without else _TYPES
    parts = list(schema.get("allOf", ()))
    if "$ref" in schema:
        parts.append(definition_of(schema, definitions))
    for part in parts:
        allowed &= _written_types(part, definitions, without, looks)
    if "anyOf" in schema:
        options = [_written_types(part, definitions, without, looks) for part in schema["anyOf"]]
        allowed &= frozenset().union(*options)
    return allowed


def _named_types(value: Any) -> frozenset[str]:
    names = frozenset([value] if isinstance(value, str) else value)
    return names | {"integer"} if "number" in names else names


_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def _ends(schema: Any, ending: set[str], pause: Callable[[], None]) -> bool:
    """Whether a text may match as far as is known: one that needs only these definitions."""
    pause()
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if not all(_ends(part, ending, pause) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(part, ending, pause) for part in schema["anyOf"]):
        return False
    parts: list[Any] = []
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        parts = [properties[name] for name in schema.get("required", ()) if name in properties]
    elif schema.get("type") == "array":
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        parts = [*first[:least], *([schema["items"]] if least > len(first) and "items" in schema else [])]
    return all(_ends(part, ending, pause) for part in parts)
