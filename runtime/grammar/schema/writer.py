"""Rewrite a JSON schema for a grammar library, or refuse it with the keyword and its place.

llguidance ignores unknown keywords, and enforces some keywords only approximately. A schema can also contain options
for llguidance (`x-guidance`), one of which makes llguidance ignore keywords that are not implemented. Therefore
llguidance never reads a client's schema. It reads the rewritten schema, which has only keywords whose enforcement is
tested against a validator. Only references into the schema itself are followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from runtime.grammar.patterns import expressions
from runtime.grammar.schema import bounds, conditions, property_counts
from runtime.grammar.schema.complement import NoComplementError, complement
from runtime.grammar.schema.disjoint import all_of
from runtime.grammar.schema.formats import INTEGER_BITS, MAX_LENGTHS, NOT_ENFORCED, format_regex
from runtime.grammar.schema.one_of import exclusive
from runtime.grammar.schema.pattern_properties import disjoint_patterns
from runtime.grammar.schema.references import (
    References,
    Unsupported,
    definition_of,
    endless,
    escaped,
    written_parts,
)
from runtime.grammar.schema.unique_items import (
    MAX_LISTED,
    UniqueArrays,
    text_property,
    texts,
    unique_names,
)

MAX_NODES = 12_000  # maximum number of subschemas and constants in all definitions
MAX_ITEMS = 2_000  # largest minItems and maxItems
MAX_ALL_ITEMS = 20_000  # largest sum of all minItems and maxItems of a schema
MAX_TEXT = 100_000  # largest minLength and maxLength
MAX_PROPERTIES = 1_000  # largest minProperties and maxProperties, and maximum number of names in `properties`
MAX_MULTIPLE = 2**32  # largest product of all values of multipleOf
MAX_ALTERNATIVES = 256  # maximum number of schemas in `oneOf`
NODES_BETWEEN_PAUSES = 64

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Refused keyword -> advice for the client. Each keyword limits JSON values in at least one draft of JSON Schema.
UNSUPPORTED: Mapping[str, str] = {
    "contains": "use prefixItems",
    "unevaluatedProperties": "use additionalProperties false",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "unevaluatedItems": "use items false",
    "extends": "use allOf",
    "disallow": "",
    "divisibleBy": "use multipleOf",
}
# Keyword that is rewritten with other keywords -> advice for the client if this is impossible.
CONDITIONS: Mapping[str, str] = {
    "not": "",
    "if": "",
    "propertyNames": "use patternProperties with additionalProperties false",
    "dependencies": "",
    "dependentRequired": "",
    "dependentSchemas": "",
}
Schema = dict[str, Any]


def for_backend(
    schema: Any,
    unique: UniqueArrays | None = None,
    budget: expressions.PatternBudget | None = None,
    *,
    at: str = "",
) -> Schema | bool:
    """Return the schema, rewritten with only keywords that llguidance enforces exactly.

    Raises `Unsupported` if the schema has keywords that cannot be rewritten in this way.

    Arrays whose items must be unique are added to `unique`, and the caller must enforce that the items differ; if
    `unique` is None, such arrays are refused. `budget` limits the patterns of all schemas in a grammar together. Only
    the schema at the JSON pointer `at` is rewritten, with the definitions that it refers to.
    """
    writer = _Writer(schema, References(schema), budget or expressions.PatternBudget(), keeps_unique=unique is not None)
    written = writer.write(at)
    if unique is not None and writer.has_unique:
        unique.update(unique_names(schema, writer.references.peek))
    return written


@dataclass(slots=True)
class _Writer:
    """Rewrites one schema. Visits each part and each target of a reference once."""

    root: Any
    references: References
    budget: expressions.PatternBudget
    num_nodes: int = 0
    num_items: int = 0
    keeps_unique: bool = False  # whether the caller enforces unique items
    has_unique: bool = False  # whether the schema has arrays whose unique items the caller must enforce
    has_maximum: bool = False  # whether the schema has a `maxProperties`
    multiple: int = 1  # the product of `multiples`
    multiples: set[int] = field(default_factory=set)  # all values of multipleOf

    def write(self, at: str = "") -> Schema | bool:
        written = self.schema(self.references.resolve(at), at)
        definitions = self.references.definitions(self.schema)
        whole = [written, *definitions.values()]
        if self.has_maximum:
            self.check_maximum(whole, definitions)
        if not definitions:
            return written
        for name in endless(definitions, lambda: self.pause("")):
            raise Unsupported("$ref", self.references.place(name), "this definition requires itself without end")
        if isinstance(written, bool) or "$ref" in written:
            written = {"allOf": [written]} if isinstance(written, bool) else written
        return {"$defs": definitions, **written}

    def check_maximum(self, whole: list[Any], definitions: Schema) -> None:
        """Refuse objects that may require more names than `maxProperties`. llguidance would ignore the limit."""
        for schema in written_parts(whole, lambda: self.pause("")):
            if property_counts.may_exceed_maximum(schema, lambda part: definition_of(part, definitions)):
                raise Unsupported("maxProperties", "", "an object may require more names than this")

    def pause(self, pointer: str, nodes: int = 1) -> None:
        """Count visited nodes, and yield the GIL regularly to the event loop's thread."""
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
                part = writer(self, value, f"{pointer}/{keyword}", schema)
                all_of = [*written.get("allOf", ()), *part.pop("allOf", ())]
                written.update(part)
                if all_of:
                    written["allOf"] = all_of
        self.narrow(schema, written, pointer)
        return written

    def check(self, schema: Schema, pointer: str) -> None:
        """Raise `Unsupported` if the schema has keywords that cannot be enforced."""
        for keyword, advice in UNSUPPORTED.items():
            if keyword not in schema:
                continue
            reason = "it cannot be enforced" + (f"; {advice}" if advice else "")
            raise Unsupported(keyword, f"{pointer}/{keyword}", reason)
        identity = schema.get("$id", schema.get("id"))
        if pointer and isinstance(identity, str) and not identity.startswith("#") and _refers(schema):
            raise Unsupported("$id", pointer, "references inside a subschema with its own $id are not followed")

    def narrow(self, schema: Schema, written: Schema, pointer: str) -> None:
        """Finish a rewritten schema: handle keywords that depend on other keywords."""
        self.count(written, pointer)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int) and written.get("type") == "number":
            # Multiples of an integer are integers. llguidance checks integers exactly, but rounds other numbers.
            written["type"] = "integer"
        for keyword in ("minItems", "minLength"):
            limit = written.get(keyword.replace("min", "max"))
            if limit is not None and written.get(keyword, 0) > limit:
                raise Unsupported(keyword, f"{pointer}/{keyword}", f"it is above {keyword.replace('min', 'max')}")

    def count(self, written: Schema, pointer: str) -> None:
        """Rewrite `minProperties` and `maxProperties`, which llguidance enforces only if no property is optional."""
        least, most, required = (
            written.get("minProperties", 0),
            written.get("maxProperties"),
            written.get("required", ()),
        )
        named = written.get("properties", {})
        optional = [name for name in named if name not in required and named[name] is not False]
        closed = written.get("additionalProperties") is False and not written.get("patternProperties")
        if most is not None and most < len(required):
            optional, least = [*named, *required], 0  # no object satisfies both, so no alternative is left
        if optional and (most is not None or least > len(required)):
            ways = property_counts.alternatives(optional, len(required), least, most, open_=not closed)
            if ways is None:
                keyword = "maxProperties" if "maxProperties" in written else "minProperties"
                raise Unsupported(
                    keyword,
                    f"{pointer}/{keyword}",
                    "it allows too many combinations of optional properties",
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
                "JSON text may repeat a name, so at most one unlisted property is counted",
            )

    # --- keywords: each method returns the keywords to write ---

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
        """Raise `Unsupported` if a constant has a number beyond 2^53 or a text that outputs cannot contain."""
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
        if exact.denominator != 1:
            raise Unsupported("multipleOf", pointer, "only multiples of integers are enforced exactly")
        multiple = int(exact)
        if multiple not in self.multiples:
            self.multiples.add(multiple)
            self.multiple *= multiple
        if self.multiple > MAX_MULTIPLE:
            raise Unsupported("multipleOf", pointer, "the product of all its values is too large")
        return {"multipleOf": multiple}

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
            value = limit  # stricter than the client's schema, so outputs still satisfy it
        if "Items" in keyword:
            self.num_items += value
            if self.num_items > MAX_ALL_ITEMS:
                raise Unsupported(keyword, pointer, f"all arrays together may hold up to {MAX_ALL_ITEMS} items")
        self.has_maximum = self.has_maximum or keyword == "maxProperties"
        if keyword == "maxLength" and schema.get("format") in MAX_LENGTHS:
            value = min(value, MAX_LENGTHS[schema["format"]])
        return {keyword: value}

    def pattern(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"pattern": self._pattern(value, "pattern", pointer)}

    def _pattern(self, value: Any, keyword: str, pointer: str) -> str:
        if not isinstance(value, str):
            raise Unsupported(keyword, pointer, "it must be a string")
        try:
            self.budget.take(value)
            return f"^(?:{expressions.search(value)})$"
        except expressions.PatternError as error:
            raise Unsupported(keyword, pointer, str(error)) from None

    def format_(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if not isinstance(value, str):
            raise Unsupported("format", pointer, "it must be a string")
        if value in INTEGER_BITS:
            whole = bounds.integer_range(value)
            return {
                "allOf": [whole if set(types_of(schema)) <= {"integer", "number"} else {"anyOf": [whole, _NO_NUMBER]}]
            }
        if value in NOT_ENFORCED:
            raise Unsupported("format", pointer, f"{value} is not enforced; use pattern")
        regex = format_regex(value)
        if regex is None:  # unknown formats are annotations, as in every validator
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
        parts = disjoint_patterns(list(named), self.references.peek, is_closed=is_closed)
        if parts is None:
            raise Unsupported(
                "patternProperties",
                pointer,
                "the patterns are too complex to compare; use additionalProperties false",
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
                raise Unsupported("prefixItems", pointer, "the draft in $schema does not have it")
            return {"items": self.schema(value, pointer)}
        written: Schema = {"prefixItems": self._list(value, pointer)}
        if "additionalItems" in schema:
            beside = pointer.rpartition("/")[0]
            written["items"] = self.schema(schema["additionalItems"], f"{beside}/additionalItems")
        return written

    def unique_items(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """Accept arrays of unique strings, or of objects with a unique string. The caller enforces the uniqueness."""
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
        advice = "items must be strings, or objects with a string in each"
        raise Unsupported("uniqueItems", pointer, f"it cannot be enforced here; {advice}")

    def prefix_items(self, value: Any, pointer: str, schema: Schema) -> Schema:
        if isinstance(schema.get("items"), list):
            raise Unsupported("prefixItems", pointer, "items is a list too")
        return {"prefixItems": self._list(value, pointer)}

    def any_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"anyOf": self._list(value, pointer)}

    def all_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        return {"allOf": self._list(value, pointer)}

    def one_of(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """Rewrite `oneOf` as `anyOf` with conditions that make the schemas disjoint."""
        if not isinstance(value, list) or not value or len(value) > MAX_ALTERNATIVES:
            raise Unsupported("oneOf", pointer, f"it must be a list of 1 to {MAX_ALTERNATIVES} schemas")
        self.pause(pointer, len(value) * len(value) // 32)
        narrowed = exclusive(value, self.references.peek)
        if isinstance(narrowed, tuple):
            raise Unsupported(
                "oneOf",
                pointer,
                f"one value may satisfy both schemas {narrowed[0]} and {narrowed[1]}; use anyOf, different types, or a "
                "property with a different const in each",
            )
        options = [
            {"allOf": [option, *[self.schema(part, pointer) for part in parts]]} if parts else option
            for option, parts in zip(self._list(value, pointer), narrowed, strict=True)
        ]
        return {"allOf": [{"anyOf": options}]} if "anyOf" in schema else {"anyOf": options}

    def condition(self, value: Any, pointer: str, schema: Schema) -> Schema:
        """Rewrite `not`, `if`, `propertyNames` or a dependency with other keywords."""
        keyword, peek, known = pointer.rpartition("/")[2], self.references.peek, (*_WRITERS, *UNSUPPORTED)
        try:
            if keyword == "not":
                rewritten = complement(value, peek, known)
            elif keyword == "if":
                return self.conditional(schema, pointer, complement(value, peek, known))
            elif keyword == "propertyNames":
                rewritten = conditions.property_names(value, peek)
            else:
                rewritten = conditions.dependent(value)
        except NoComplementError as error:
            advice = CONDITIONS[keyword] or f"{error} in it has no exact complement"
            raise Unsupported(keyword, pointer, f"it cannot be enforced; {advice}") from None
        return {"allOf": [self.schema(rewritten, pointer)]}

    def conditional(self, schema: Schema, pointer: str, otherwise: Any) -> Schema:
        """Rewrite `if`, `then` and `else` as two alternatives. `otherwise` is the complement of `if`."""
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
        return {"$ref": f"#/$defs/{self.references.name(value, pointer)}"}


Writer = Callable[[_Writer, Any, str, Schema], Schema]
_WRITERS: Mapping[str, Writer] = {
    "type": _Writer.type_,
    "enum": _Writer.enum,
    "const": _Writer.const,
    **dict.fromkeys(bounds.NUMBERS, _Writer.limit),
    "multipleOf": _Writer.multiple_of,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Writer.size),
    "pattern": _Writer.pattern,
    "format": _Writer.format_,
    "properties": _Writer.properties,
    "patternProperties": _Writer.pattern_properties,
    "additionalProperties": _Writer.subschema,
    "required": _Writer.required,
    "items": _Writer.items,
    "prefixItems": _Writer.prefix_items,
    "uniqueItems": _Writer.unique_items,
    "anyOf": _Writer.any_of,
    "allOf": _Writer.all_of,
    "oneOf": _Writer.one_of,
    "$ref": _Writer.ref,
    **dict.fromkeys(CONDITIONS, _Writer.condition),
}
_NO_NUMBER: Schema = {"type": ["null", "boolean", "string", "array", "object"]}


def _check_text(text: str, pointer: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unsupported("text", pointer, "an unpaired surrogate is not valid text") from None
    if not expressions.UNWRITTEN.isdisjoint(text):
        raise Unsupported("text", pointer, "outputs hold no control characters but those with a short JSON escape")


def _refers(schema: Any) -> bool:
    """Whether the schema contains a reference. Recursion is safe, because the parser limits the depth."""
    if isinstance(schema, dict):
        return "$ref" in schema or any(_refers(item) for item in schema.values())
    return isinstance(schema, list) and any(_refers(item) for item in schema)


def _is_old(root: Any) -> bool:
    """Whether `$schema` is a draft before 2020-12."""
    named = root.get("$schema") if isinstance(root, dict) else None
    return isinstance(named, str) and any(draft in named for draft in ("draft-0", "2019-09"))


def types_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the types that the schema's `type` allows, or all types if there is no `type`."""
    value = schema.get("type")
    return [value] if isinstance(value, str) else value if isinstance(value, list) else TYPES
