"""JSON schemas: what can be enforced is written anew for the backend, all else is refused by keyword and place.

llguidance knows no keyword outside its own table, ignores unknown ones, takes options from the schema itself
(`x-guidance`, among them one that ignores what it does not implement), and holds some keywords only nearly. So it
never sees a client's schema: what it gets is written here, from keywords whose enforcement is tested against a
validator. References are resolved here and lead nowhere but into the schema itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any
from urllib.parse import quote

from runtime.grammar import bounds, conditions, patterns
from runtime.grammar.disjoint import all_of
from runtime.grammar.formats import INTEGER_BITS, MAX_LENGTHS, format_regex
from runtime.grammar.opposites import NoOppositeError, opposite
from runtime.grammar.references import (
    REFERENCES,
    References,
    Unsupported,
    definition_of,
    drop_what_references_say,
    endless,
    escaped,
    without,
    written_parts,
)
from runtime.grammar.unique_items import (
    MAX_LISTED,
    MAX_UNIQUE,
    UniqueArrays,
    text_property,
    texts,
    unique_arrays,
    unique_names,
)

MAX_NODES = 12_000  # subschemas, after references are followed, and enum values
MAX_ITEMS = 2_000  # minItems and maxItems; over all arrays of a schema:
MAX_ALL_ITEMS = 20_000
MAX_TEXT = 100_000  # minLength and maxLength
MAX_PROPERTIES = 1_000  # minProperties and maxProperties, and names in properties
MAX_MULTIPLE = 2**32
MAX_ALTERNATIVES = 256  # of oneOf
MAX_CONTAINED = 2  # items that `contains` may ask for
CONTAINED_PLACES = 5  # where they are looked for
NODES_BETWEEN_PAUSES = 64

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords of some draft that limit values and that nothing here enforces.
UNSUPPORTED: Mapping[str, str] = {
    "unevaluatedItems": "use items false",
    "extends": "use allOf",
    "disallow": "",
    "divisibleBy": "use multipleOf",
}
# Those that are written with other keywords, as far as these can say it: see `conditions`.
CONDITIONS: Mapping[str, str] = {
    "not": "",
    "if": "",
    "propertyNames": "use patternProperties with additionalProperties false",
    "dependencies": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "unevaluatedProperties": "use additionalProperties false",
}
Schema = dict[str, Any]


def for_backend(
    schema: Any, unique: UniqueArrays | None = None, room: patterns.Room | None = None, *, at: str = ""
) -> Schema | bool:
    """The schema with nothing in it but what is enforced exactly. Raises `Unsupported`.

    With `unique`, arrays of texts that must not repeat any are named there, for others to enforce. `room` is what the
    patterns of other schemas in the same grammar leave. `at` is a JSON pointer: only what stands there is written, and
    what it refers to.
    """
    writer = _Writer(schema, References(schema), room or patterns.Room(), keeps_unique=unique is not None)
    written = writer.write(at)
    if unique is not None and writer.has_unique:
        unique.update(unique_names(schema, writer.references.peek))
    return written


@dataclass(slots=True)
class _Writer:
    """Walks a schema once, and every place that a reference leads to once."""

    root: Any
    references: References
    room: patterns.Room
    num_nodes: int = 0
    num_items: int = 0
    keeps_unique: bool = False  # whether somebody else keeps texts from being repeated
    has_unique: bool = False
    has_most: bool = False  # whether there is a `maxProperties`
    multiple: Fraction = Fraction(1)  # the product of all different multipleOf
    multiples: set[Fraction] = field(default_factory=set)

    def write(self, at: str = "") -> Schema | bool:
        written = self.schema(self.references.resolve(at), at)
        definitions = self.references.definitions(self.schema)
        whole = [written, *definitions.values()]
        if self.has_most:
            self.check_most(whole, definitions)
        if not definitions:
            return written
        drop_what_references_say(written_parts(whole, lambda: self.pause("")), definitions)
        dead = endless(definitions, lambda: self.pause(""))
        if dead:
            definitions = {
                name: without(each, dead) for name, each in definitions.items() if name not in dead
            }
            written = without(written, dead)
        if isinstance(written, bool) or "$ref" in written:
            written = {"allOf": [written]} if isinstance(written, bool) else written
        return {"$defs": definitions, **written}

    def check_most(self, whole: list[Any], definitions: Schema) -> None:
        """Refuse objects that may need more names than they may have: the library would not hold their limit."""
        for schema in written_parts(whole, lambda: self.pause("")):
            if conditions.may_need_too_many(schema, lambda part: definition_of(part, definitions)):
                raise Unsupported("maxProperties", "", "more names are required than an object may have")

    # --- places ---

    def pause(self, pointer: str, nodes: int = 1) -> None:
        """Count, and let other threads run: this one computes beside the event loop."""
        before = self.num_nodes
        self.num_nodes += nodes
        if self.num_nodes > MAX_NODES:
            raise Unsupported("schema", pointer, f"it has more than {MAX_NODES} parts")
        if before // NODES_BETWEEN_PAUSES != self.num_nodes // NODES_BETWEEN_PAUSES:
            time.sleep(0)

    # --- a schema ---

    def schema(self, schema: Any, pointer: str) -> Schema | bool:
        self.pause(pointer)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unsupported("schema", pointer, "it must be an object, true or false")
        self.check(schema, pointer)
        written: Schema = {}
        for keyword, value in schema.items():
            writer = _WRITERS.get(keyword)
            if writer is not None:
                found = writer(self, value, f"{pointer}/{keyword}", schema)
                together = [*written.get("allOf", ()), *found.pop("allOf", ())]
                written.update(found)
                if together:
                    written["allOf"] = together
        self.narrow(schema, written, pointer)
        return written

    def check(self, schema: Schema, pointer: str) -> None:
        """Raise `Unsupported` for keywords that nothing enforces."""
        for keyword, advice in UNSUPPORTED.items():
            if keyword not in schema:
                continue
            reason = "it cannot be enforced" + (f"; {advice}" if advice else "")
            raise Unsupported(keyword, f"{pointer}/{keyword}", reason)
        identity = schema.get("$id", schema.get("id"))
        if pointer and isinstance(identity, str) and not identity.startswith("#") and _refers(schema):
            raise Unsupported("$id", pointer, "references below an $id of their own are not followed")

    def narrow(self, schema: Schema, written: Schema, pointer: str) -> None:
        """What several keywords mean together."""
        self.count(written, pointer)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int) and written.get("type") == "number":
            # The same values, without digits behind the point that rounding could hide.
            written["type"] = "integer"
        for keyword in ("minItems", "minLength"):
            limit = written.get(keyword.replace("min", "max"))
            if limit is not None and written.get(keyword, 0) > limit:
                raise Unsupported(
                    keyword, f"{pointer}/{keyword}", f"it is above {keyword.replace('min', 'max')}"
                )

    def count(self, written: Schema, pointer: str) -> None:
        """`minProperties` and `maxProperties`, which the library counts where no property is optional."""
        least, most, required = (
            written.get("minProperties", 0),
            written.get("maxProperties"),
            written.get("required", ()),
        )
        named = written.get("properties", {})
        optional = [name for name in named if name not in required and named[name] is not False]
        closed = written.get("additionalProperties") is False and not written.get("patternProperties")
        if most is not None and most < len(required):
            optional, least = [*named, *required], 0  # none is the way to have as many
        if optional and (most is not None or least > len(required)):
            ways = conditions.counted(optional, len(required), least, most, others=not closed)
            if ways is None:
                keyword = "maxProperties" if "maxProperties" in written else "minProperties"
                raise Unsupported(
                    keyword,
                    f"{pointer}/{keyword}",
                    "there are too many ways to have as many of its optional properties",
                )
            self.pause(pointer, len(ways) * len(optional) // 8)
            for keyword in ("minProperties", "maxProperties"):
                written.pop(keyword, None)
            others = set(types_of(written)) - {"object"}
            options = [*(ways or [False]), *([{"type": sorted(others)}] if others else [])]
            written["allOf"] = [*written.get("allOf", ()), {"anyOf": options}]
        elif not closed and least > len(required) + 1:
            raise Unsupported(
                "minProperties",
                f"{pointer}/minProperties",
                "names may repeat in a JSON text, so it is enforced up to one more than those that are listed",
            )

    # --- keywords: each gives what is written for it ---

    def type_(self, value: Any, pointer: str, schema: Schema) -> Schema:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
            raise Unsupported("type", pointer, f"it must be one or a list of {', '.join(TYPES)}")
        if "number" in names and "integer" in names:
            names = [name for name in names if name != "integer"]
        names = list(dict.fromkeys(names))
        return {"type": names[0] if len(names) == 1 else names}

    def enum(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if not isinstance(value, list) or not value:
            raise Unsupported("enum", pointer, "it must be a list that is not empty")
        for index, item in enumerate(value):
            self.value(item, f"{pointer}/{index}")
        return {"enum": value}

    def const(self, value: Any, pointer: str, schema: Schema) -> Schema:
        self.value(value, pointer)
        return {"const": value}

    def value(self, value: Any, pointer: str) -> None:
        """Raise `Unsupported` for a constant that a JSON text cannot hold, or not exactly."""
        self.pause(pointer)
        if isinstance(value, dict):
            for key, item in value.items():
                _check_text(key, pointer)
                self.value(item, f"{pointer}/{escaped(key)}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.value(item, f"{pointer}/{index}")
        elif isinstance(value, str):
            _check_text(value, pointer)
        elif not isinstance(value, bool) and isinstance(value, int | float):
            bounds.check_number(value, "a constant", pointer)

    def limit(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return bounds.limit(value, pointer, schema)

    def multiple_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        bounds.check_number(value, "multipleOf", pointer)
        exact = Fraction(value)
        if exact <= 0:
            raise Unsupported("multipleOf", pointer, "it must be above 0")
        if exact.denominator > 2**10:
            raise Unsupported(
                "multipleOf",
                pointer,
                f"floating-point numbers hold no multiples of {value} exactly; use an integer, 0.5, 0.25 ...",
            )
        if exact not in self.multiples:
            self.multiples.add(exact)
            self.multiple *= exact.numerator * 10 ** len(str(exact.denominator - 1))
        if self.multiple > MAX_MULTIPLE:
            raise Unsupported("multipleOf", pointer, "the multiples of this schema are too large together")
        return {"multipleOf": int(exact) if exact.denominator == 1 else value}

    def size(self, value: Any, pointer: str, schema: Schema) -> Schema:
        keyword = pointer.rpartition("/")[2]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise Unsupported(keyword, pointer, "it must be an integer of at least 0")
        limit = MAX_TEXT if "Length" in keyword else MAX_ITEMS if "Items" in keyword else MAX_PROPERTIES
        if value > limit:
            if keyword not in ("maxLength", "maxItems"):
                raise Unsupported(keyword, pointer, f"it may be up to {limit}")
            value = limit  # fewer than it allows
        if "Items" in keyword:
            self.num_items += value
            if self.num_items > MAX_ALL_ITEMS:
                raise Unsupported(
                    keyword, pointer, f"all arrays together may hold up to {MAX_ALL_ITEMS} items"
                )
        self.has_most = self.has_most or keyword == "maxProperties"
        if keyword == "maxLength" and schema.get("format") in MAX_LENGTHS:
            value = min(value, MAX_LENGTHS[schema["format"]])
        return {keyword: value}

    def pattern(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"pattern": self._pattern(value, "pattern", pointer)}

    def _pattern(self, value: Any, keyword: str, pointer: str) -> str:
        if not isinstance(value, str):
            raise Unsupported(keyword, pointer, "it must be a string")
        try:
            self.room.take(value)
            return f"^(?:{patterns.search(value)})$"
        except patterns.PatternError as error:
            raise Unsupported(keyword, pointer, str(error)) from None

    def format_(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if not isinstance(value, str):
            raise Unsupported("format", pointer, "it must be a string")
        if value in INTEGER_BITS:
            whole = bounds.integer_range(value)
            return {
                "allOf": [
                    whole
                    if set(types_of(schema)) <= {"integer", "number"}
                    else {"anyOf": [whole, _NO_NUMBER]}
                ]
            }
        regex = format_regex(value)
        if regex is None:  # a name that no draft knows says nothing to a validator
            return {}
        written: Schema = {"pattern": f"^(?:{regex})$"}
        if value in MAX_LENGTHS and "maxLength" not in schema:
            written["maxLength"] = MAX_LENGTHS[value]
        return written if "pattern" not in schema else {"allOf": [written]}

    def properties(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"properties": self._named(value, pointer)}

    def pattern_properties(self, value: Any, pointer: str, schema: Schema) -> Schema:
        named = self._named(value, pointer)
        patterns_ = [self._pattern(key, "patternProperties", f"{pointer}/{escaped(key)}") for key in named]
        if len(set(patterns_)) < len(patterns_):
            raise Unsupported("patternProperties", pointer, "two patterns are the same")
        is_closed = schema.get("additionalProperties") is False
        parts = conditions.names_apart(list(named), self.references.peek, is_closed=is_closed)
        if parts is None:
            raise Unsupported(
                "patternProperties",
                pointer,
                "it is not seen which names match; use additionalProperties false",
            )
        schemas, written = list(named.values()), Schema()
        for key, indices in parts:
            known = isinstance(key, int)
            regex = patterns_[key] if known else self._pattern(key, "patternProperties", pointer)
            written[regex] = all_of([schemas[index] for index in indices]) if indices else False
        return {"patternProperties": written}

    def _named(self, value: Any, pointer: str) -> Schema:
        keyword = pointer.rpartition("/")[2]
        if not isinstance(value, dict):
            raise Unsupported(keyword, pointer, "it must be an object")
        if len(value) > MAX_PROPERTIES:
            raise Unsupported(keyword, pointer, f"it may hold up to {MAX_PROPERTIES} names")
        for key in value:
            _check_text(key, pointer)
        return {key: self.schema(item, f"{pointer}/{escaped(key)}") for key, item in value.items()}

    def required(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise Unsupported("required", pointer, "it must be a list of names")
        for name in value:
            _check_text(name, pointer)
        self.pause(pointer, len(value))
        return {"required": list(dict.fromkeys(value))}

    def subschema(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {pointer.rpartition("/")[2]: self.schema(value, pointer)}

    def items(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if not isinstance(value, list):
            if "prefixItems" in schema and _is_old(self.root):
                raise Unsupported("prefixItems", pointer, "the draft that $schema names does not know it")
            return {"items": self.schema(value, pointer)}
        written: Schema = {"prefixItems": self._list(value, pointer)}
        if "additionalItems" in schema:
            beside = pointer.rpartition("/")[0]
            written["items"] = self.schema(schema["additionalItems"], f"{beside}/additionalItems")
        return written

    def unique_items(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """Where few values may be items: as one of the arrays that are made of them; else where all are texts."""
        if value is False or (bounds.is_number(schema.get("maxItems")) and schema["maxItems"] <= 1):
            return {}
        if value is True and self.keeps_unique and "prefixItems" not in schema:
            listed, name = texts(schema.get("items"), self.references.peek), None
            if listed is None:
                name, listed = text_property(schema.get("items"), self.references.peek) or (None, None)
            if listed is not None:
                self.has_unique = True
                told_apart: Schema = {} if name is None else {"items": {"required": [name]}}
                if 0 < len(listed) <= MAX_LISTED:
                    told_apart["maxItems"] = len(listed)
                return {"allOf": [told_apart]} if told_apart else {}
        arrays = unique_arrays(self.references.peek(schema.get("items")), schema)
        if value is not True or arrays is None or "prefixItems" in schema:
            advice = (
                "but for items that are texts, objects with a text in each, or one of an enum of up to "
                f"{MAX_UNIQUE} values"
            )
            raise Unsupported("uniqueItems", pointer, f"it cannot be enforced {advice}")
        self.pause(pointer, len(arrays))
        unique: Schema = {"enum": arrays} if arrays else {"allOf": [False]}
        others = set(types_of(schema)) - {"array"}
        return {"allOf": [{"anyOf": [unique, {"type": sorted(others)}]} if others else unique]}

    def contains(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """At the first places of an array, where an output has it then; `value` is written once, and referred to."""
        least = schema.get("minContains", 1)
        if type(least) is not int or not 0 <= least <= MAX_CONTAINED:
            raise Unsupported("minContains", pointer, f"it may be up to {MAX_CONTAINED}")
        if "maxContains" in schema:
            raise Unsupported("maxContains", pointer, "it cannot be enforced")
        if least == 0:
            return {}
        part = self.ref(f"#{quote(pointer)}", f"{pointer}/$ref", schema)
        arrays: list[Schema] = []
        for places in combinations(range(CONTAINED_PLACES), least):
            first = [part if place in places else True for place in range(places[-1] + 1)]
            arrays.append({"type": "array", "prefixItems": first, "minItems": len(first)})
        others = set(types_of(schema)) - {"array"}
        return {"allOf": [{"anyOf": [*arrays, *([{"type": sorted(others)}] if others else [])]}]}

    def nothing(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """Written with another keyword."""
        return {}

    def prefix_items(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if isinstance(schema.get("items"), list):
            raise Unsupported("prefixItems", pointer, "it stands beside a list in items")
        return {"prefixItems": self._list(value, pointer)}

    def any_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"anyOf": self._list(value, pointer)}

    def all_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"allOf": self._list(value, pointer)}

    def one_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """As anyOf, where no two of them can hold at once."""
        if not isinstance(value, list) or not value or len(value) > MAX_ALTERNATIVES:
            raise Unsupported("oneOf", pointer, f"it must be a list of 1 to {MAX_ALTERNATIVES} schemas")
        self.pause(pointer, len(value) * len(value) // 32)
        found = conditions.exclusive(value, self.references.peek)
        if isinstance(found, tuple):
            raise Unsupported(
                "oneOf",
                pointer,
                f"its schemas {found[0]} and {found[1]} may both hold; use anyOf, or different types, or a property "
                "with a const of its own in each",
            )
        options = [
            {"allOf": [option, *[self.schema(part, pointer) for part in parts]]} if parts else option
            for option, parts in zip(self._list(value, pointer), found, strict=True)
        ]
        return {"allOf": [{"anyOf": options}]} if "anyOf" in schema else {"anyOf": options}

    def condition(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """A keyword that others can say."""
        keyword, peek, known = pointer.rpartition("/")[2], self.references.peek, (*_WRITERS, *UNSUPPORTED)
        try:
            if keyword == "not":
                found = opposite(value, peek, known)
            elif keyword == "if":
                return self.conditional(schema, pointer, opposite(value, peek, known))
            elif keyword == "propertyNames":
                found = conditions.names(value, peek)
            elif keyword == "unevaluatedProperties":
                found = conditions.unevaluated(schema, peek)
            else:
                found = conditions.dependent(value)
        except NoOppositeError as error:
            advice = CONDITIONS[keyword] or f"{error} in it cannot be turned round"
            raise Unsupported(keyword, pointer, f"it cannot be enforced; {advice}") from None
        return {"allOf": [self.schema(found, pointer)]}

    def conditional(self, schema: Schema, pointer: str, otherwise: Any) -> Schema:
        """`if`, `then` and `else`, with what the condition refuses."""
        if not schema.keys() & {"then", "else"}:
            return {}
        beside = pointer.rpartition("/")[0]
        branches = [
            {"allOf": [self.schema(part, pointer), self.schema(schema.get(name, True), f"{beside}/{name}")]}
            for name, part in (("then", schema["if"]), ("else", otherwise))
        ]
        return {"allOf": [{"anyOf": branches}]}

    def _list(self, value: Any, pointer: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise Unsupported(pointer.rpartition("/")[2], pointer, "it must be a list that is not empty")
        return [self.schema(item, f"{pointer}/{index}") for index, item in enumerate(value)]

    def ref(self, value: Any, pointer: str, schema: Schema) -> Schema:
        name = self.references.name(value, pointer)
        reference = {"$ref": f"#/$defs/{name}"}
        return reference if pointer.endswith("/$ref") else {"allOf": [reference]}


Writer = Callable[[_Writer, Any, str, Schema], Schema]
_WRITERS: Mapping[str, Writer] = {
    "type": _Writer.type_,
    "enum": _Writer.enum,
    "const": _Writer.const,
    **dict.fromkeys(bounds.NUMBERS, _Writer.limit),
    "multipleOf": _Writer.multiple_of,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Writer.size
    ),
    "pattern": _Writer.pattern,
    "format": _Writer.format_,
    "properties": _Writer.properties,
    "patternProperties": _Writer.pattern_properties,
    "additionalProperties": _Writer.subschema,
    "required": _Writer.required,
    "items": _Writer.items,
    "prefixItems": _Writer.prefix_items,
    "uniqueItems": _Writer.unique_items,
    "contains": _Writer.contains,
    **dict.fromkeys(("minContains", "maxContains"), _Writer.nothing),
    "anyOf": _Writer.any_of,
    "allOf": _Writer.all_of,
    "oneOf": _Writer.one_of,
    **dict.fromkeys(REFERENCES, _Writer.ref),
    **dict.fromkeys(CONDITIONS, _Writer.condition),
}
_NO_NUMBER: Schema = {"type": ["null", "boolean", "string", "array", "object"]}


def _check_text(text: str, pointer: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unsupported("text", pointer, "half a surrogate pair is no text") from None
    if not patterns.UNWRITTEN.isdisjoint(text):
        raise Unsupported("text", pointer, "outputs hold no control character that JSON has no letter for")


def _refers(schema: Any) -> bool:
    """Whether there is a reference below; the schema's depth is bounded."""
    if isinstance(schema, dict):
        return not schema.keys().isdisjoint(REFERENCES) or any(_refers(item) for item in schema.values())
    return isinstance(schema, list) and any(_refers(item) for item in schema)


def _is_old(root: Any) -> bool:
    """Whether the schema names a draft before 2020-12."""
    named = root.get("$schema") if isinstance(root, dict) else None
    return isinstance(named, str) and any(draft in named for draft in ("draft-0", "2019-09"))


def types_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """The types that a schema allows by its own keyword."""
    value = schema.get("type")
    return [value] if isinstance(value, str) else value if isinstance(value, list) else TYPES
