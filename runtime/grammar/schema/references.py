"""Resolve the references (`$ref`) of a JSON schema. References may point only into the schema itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from runtime.grammar_spec import InvalidGrammar

MAX_COMPARED = 100_000  # maximum number of calls of `References.peek` by comparisons and complements
MAX_STEPS = 16  # maximum length of a chain of references
MAX_PASSES = 20  # maximum number of passes over recursive definitions
COMPARED_BETWEEN_PAUSES = 64


class Unsupported(InvalidGrammar):
    """Raised if a keyword is malformed or cannot be enforced. The message has the keyword and its JSON pointer."""

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        super().__init__(f"{keyword} at {pointer or '/'}: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason

    def inside(self, place: str) -> Unsupported:
        """Return this error with `place` before the pointer. `place` is the schema's place in a larger document."""
        return Unsupported(self.keyword, place + self.pointer, self.reason)


def escaped(name: str) -> str:
    """Return the name, escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class References:
    """The references of one schema. Each target of a reference gets a name, and becomes one definition."""

    def __init__(self, root: Any) -> None:
        identity = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self._root = root
        self._root_id = identity.rstrip("#") if isinstance(identity, str) else ""
        self._names: dict[str, str] = {}  # JSON pointer of a target -> name of its definition
        self._pending: list[str] = []
        self._num_compared = 0

    def name(self, reference: Any, pointer: str) -> str:
        """Return the name of the definition that a reference points to. Raises `Unsupported` if there is none."""
        target = self.target(reference, pointer)
        self.resolve(target)
        if target not in self._names:
            self._names[target] = f"d{len(self._names)}"
            self._pending.append(target)
        return self._names[target]

    def place(self, name: str) -> str:
        """Return the JSON pointer of the definition called `name`."""
        return next(pointer for pointer, each in self._names.items() if each == name)

    def definitions(self, write: Callable[[Any, str], Any]) -> dict[str, Any]:
        """Return all definitions, rewritten by `write(schema, pointer)`, which may add further definitions."""
        definitions: dict[str, Any] = {}
        while self._pending:
            pointer = self._pending.pop()
            definitions[self._names[pointer]] = write(self.resolve(pointer), pointer)
        return definitions

    def peek(self, schema: Any) -> Any:
        """Return the target if `schema` is a reference, else `schema`. Raises `Unsupported` after too many calls."""
        self._num_compared += 1
        if self._num_compared > MAX_COMPARED:
            raise Unsupported("schema", "", "there is too much in it to compare")
        if self._num_compared % COMPARED_BETWEEN_PAUSES == 0:
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
        """Return the value at a JSON pointer. Raises `Unsupported` if there is none."""
        found = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and len(key) < 8 and int(key) < len(found):
                found = found[int(key)]
            else:
                raise Unsupported("$ref", f"/{pointer.lstrip('/')}", "the schema has nothing at this place")
        return found

    def target(self, reference: Any, pointer: str) -> str:
        """Return the JSON pointer that a reference names. `pointer` is the place of the reference, for errors."""
        if not isinstance(reference, str):
            raise Unsupported("$ref", pointer, "it must be a string")
        if self._root_id and reference.startswith(self._root_id + "#"):
            reference = reference[len(self._root_id) :]
        if reference in ("#", "#/"):
            return ""
        if not reference.startswith("#/"):
            raise Unsupported("$ref", pointer, "only JSON pointers into the schema itself (#/...) are followed")
        try:
            return unquote(reference[1:], errors="strict") if "%" in reference else reference[1:]
        except UnicodeDecodeError:
            raise Unsupported("$ref", pointer, "its escapes are not UTF-8") from None


def endless(definitions: Mapping[str, Any], pause: Callable[[], None]) -> set[str]:
    """Return the names of the definitions that no finite text matches, because they require themselves.

    An output of such a definition would never end. `definitions` must already be rewritten for the backend. `pause` is
    called for each visited schema.
    """
    ending: set[str] = set()
    open_ = list(definitions)[::-1]  # inner definitions come last; checking them first saves passes
    for _ in range(MAX_PASSES):
        found = [name for name in open_ if _ends(definitions[name], ending, pause)]
        if not found:
            return set(open_)
        ending.update(found)
        open_ = [name for name in open_ if name not in ending]
    return set()


def written_parts(schemas: Collection[Any], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield `schemas` and all schemas inside them. They must already be rewritten for the backend."""
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


def definition_of(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return the target of a `$ref` in a schema that is already rewritten for the backend."""
    return definitions[schema["$ref"].removeprefix("#/$defs/")]


def _ends(schema: Any, ending: set[str], pause: Callable[[], None]) -> bool:
    """Whether a finite text may match `schema`, if only the definitions in `ending` are known to match finite texts."""
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
