"""Structural tags: free text with tags that contain JSON or other constrained parts, converted to a Lark grammar.

There are two forms. {"structures": [{"begin", "schema", "end"}], "triggers": [...]} is free text. When a trigger occurs
in the text, a structure whose `begin` starts with this trigger must follow. {"format": {...}} nests formats:
`const_string`, `json_schema`, `regex`, `any_text`, `tag`, `sequence`, `or`, `optional`, `star`, `plus`,
`triggered_tags` and `tags_with_separator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.grammar.patterns import expressions
from runtime.grammar.schema import json_text
from runtime.grammar.syntax.lark import quoted
from runtime.grammar_spec import InvalidGrammar

MAX_TAGS = 256
MAX_FORMATS = 1024
MAX_DEPTH = 16
REPEATS: Mapping[str, str] = {"optional": "?", "star": "*", "plus": "+"}  # format -> Lark's operator
WriteSchema = Callable[[Any, str], str]  # (schema, its place for error messages) -> its JSON text

_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {  # format -> (required keys, optional keys)
    "const_string": (frozenset({"value"}), frozenset()),
    "json_schema": (frozenset({"json_schema"}), frozenset({"style"})),
    "regex": (frozenset({"pattern"}), frozenset()),
    "any_text": (frozenset(), frozenset()),
    "tag": (frozenset({"begin", "content", "end"}), frozenset()),
    "sequence": (frozenset({"elements"}), frozenset()),
    "or": (frozenset({"elements"}), frozenset()),
    "optional": (frozenset({"content"}), frozenset()),
    "star": (frozenset({"content"}), frozenset()),
    "plus": (frozenset({"content"}), frozenset()),
    "triggered_tags": (frozenset({"triggers", "tags"}), frozenset({"at_least_one", "stop_after_first"})),
    "tags_with_separator": (frozenset({"tags", "separator"}), frozenset({"at_least_one", "stop_after_first"})),
}


def structural_tag_to_lark(source: str, write_schema: WriteSchema) -> str:
    """Return the Lark grammar of a structural tag, given as JSON. Raises `InvalidGrammar` with the error's place."""
    tag = json_text.parse(source)
    if not isinstance(tag, dict):
        raise InvalidGrammar("it must be an object")
    writer = _Writer(write_schema)
    if "format" in tag:
        body = writer.format(tag["format"], "format")
    else:
        body = writer.triggered(*_old_form(tag))
    return "\n".join([f"start: {body}", r"TEXT: /(?s:.*)/", *writer.rules])


def schemas_of_tag(source: str) -> list[tuple[str, Any]]:
    """Return (place for error messages, schema) for each JSON schema in a structural tag."""
    found: list[tuple[str, Any]] = []

    def find(schema: Any, place: str) -> str:
        found.append((place, schema))
        return "true"

    structural_tag_to_lark(source, find)
    return found


def _old_form(tag: Mapping[str, Any]) -> tuple[list[tuple[Any, str]], Any, str]:
    """Read the form with "structures". Return (tags with their places, triggers, place of the triggers)."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures or len(structures) > MAX_TAGS:
        raise InvalidGrammar(f"structures must be a list of 1 to {MAX_TAGS} objects")
    tags = []
    for index, each in enumerate(structures):
        is_object = isinstance(each, dict) and not each.keys() - {"begin", "schema", "end"}
        if not is_object or not isinstance(each.get("begin"), str) or not isinstance(each.get("end", ""), str):
            raise InvalidGrammar(f"structures/{index} must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": each.get("schema", True)}
        tags.append(({"begin": each["begin"], "content": content, "end": each.get("end", "")}, f"structures/{index}"))
    return tags, tag.get("triggers"), "triggers"


class _Writer:
    def __init__(self, write_schema: WriteSchema) -> None:
        self.rules: list[str] = []
        self._write_schema = write_schema
        self._num_formats = 0
        self._num_rules = 0

    def format(self, value: Any, place: str, end: Sequence[str] = ("",), depth: int = 0) -> str:
        """Return Lark for a format, followed by one of the texts in `end`."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in _KEYS:
            raise InvalidGrammar(f"{place}/type must be one of {', '.join(_KEYS)}")
        required, further = _KEYS[kind]
        if missing := sorted(required - value.keys()):
            raise InvalidGrammar(f"{place}/{missing[0]} is required")
        if unknown := sorted(value.keys() - required - further - {"type"}):
            raise InvalidGrammar(f"{place}/{unknown[0]} is not known")
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise InvalidGrammar(f"it may have {MAX_FORMATS} formats, nested {MAX_DEPTH} deep")
        if kind == "any_text":
            return self._text(end)
        if kind == "triggered_tags":
            tags = [(tag, f"{place}/tags/{index}") for index, tag in enumerate(_list(value, "tags", place))]
            once = bool(value.get("stop_after_first"))
            first = bool(value.get("at_least_one"))
            return self.triggered(tags, value["triggers"], f"{place}/triggers", end, depth, first=first, once=once)
        if kind == "tag":
            content, ends = value["content"], value["end"]
            ends = [ends] if isinstance(ends, str) else ends
            if not isinstance(ends, list) or not ends:
                raise InvalidGrammar(f"{place}/end must be a text or a list of texts")
            begin, closing = _text_of(value["begin"], f"{place}/begin"), [_text_of(e, f"{place}/end") for e in ends]
            inner = self.format(content, f"{place}/content", closing, depth + 1)
            return f"{quoted(begin)} {inner} {_any_of(end)}"
        if kind in REPEATS:
            return self._repeated(kind, value["content"], f"{place}/content", depth) + f" {_any_of(end)}"
        if kind == "sequence":
            return self._sequence(_list(value, "elements", place), place, end, depth)
        if kind == "or":
            parts = [
                self.format(each, f"{place}/elements/{index}", end, depth + 1)
                for index, each in enumerate(_list(value, "elements", place))
            ]
            return f"({' | '.join(parts)})"
        return f"{self._plain(kind, value, place, depth)} {_any_of(end)}"

    def _repeated(self, kind: str, content: Any, place: str, depth: int) -> str:
        """Return Lark for optional or repeated content. Raises `InvalidGrammar` if the content ends with free text."""
        body = self.format(content, place, ("",), depth + 1)
        if _ends_freely(content):
            raise InvalidGrammar(f"{place} ends with free text, so {kind} must not contain it")
        return f"{self._rule(body)}{REPEATS[kind]}"

    def _plain(self, kind: str, value: Mapping[str, Any], place: str, depth: int) -> str:
        if kind == "const_string":
            return quoted(_text_of(value["value"], f"{place}/value"))
        if kind == "json_schema":
            if value.get("style", "json") != "json":
                raise InvalidGrammar(f"{place}/style must be json")
            is_old = place.startswith("structures/")
            at = place.removesuffix("content") + "schema" if is_old else f"{place}/json_schema"
            return f"%json {self._write_schema(value['json_schema'], at)}"
        if kind == "regex":
            try:
                return f"/{expressions.full(_text_of(value['pattern'], f'{place}/pattern'))}/"
            except expressions.PatternError as error:
                raise InvalidGrammar(f"{place}/pattern: {error}") from None
        tags = [
            self.format(
                {"type": "tag", **_object(tag, f"{place}/tags/{index}")}, f"{place}/tags/{index}", ("",), depth + 1
            )
            for index, tag in enumerate(_list(value, "tags", place))
        ]
        rule = self._rule(" | ".join(tags))
        separator = quoted(_text_of(value["separator"], f"{place}/separator"))
        body = rule if value.get("stop_after_first") else f"{rule} ({separator} {rule})*"
        return f"({body})" if value.get("at_least_one") else f"({body})?"

    def _sequence(self, elements: Sequence[Any], place: str, end: Sequence[str], depth: int) -> str:
        """Return Lark for a sequence. Free text in the sequence ends where the next element's fixed text begins."""
        parts: list[str] = []
        index = 0
        while index < len(elements):
            at, element, is_last = f"{place}/elements/{index}", elements[index], index == len(elements) - 1
            index += 1
            if is_last:
                return " ".join([*parts, self.format(element, at, end, depth + 1)])
            is_free = isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags")
            if not is_free:
                parts.append(self.format(element, at, ("",), depth + 1))
                continue
            following = elements[index] if isinstance(elements[index], dict) else {}
            key = {"const_string": "value", "tag": "begin"}.get(following.get("type", ""))
            if key is None or not following.get(key):
                raise InvalidGrammar(f"{at} is free text, so a const_string or a tag must follow")
            parts.append(
                self.format(element, at, (_text_of(following[key], f"{place}/elements/{index}/{key}"),), depth + 1)
            )
            elements = [*elements[:index], {**following, key: ""}, *elements[index + 1 :]]
        return " ".join(parts)

    def triggered(
        self,
        tags: Sequence[tuple[Any, str]],
        triggers: Any,
        place: str,
        end: Sequence[str] = ("",),
        depth: int = 0,
        *,
        first: bool = False,
        once: bool = False,
    ) -> str:
        """Return Lark for free text with tags. Wherever a trigger occurs, a tag begins that starts with this trigger.

        With `first`, the output begins with a tag. With `once`, the output ends after the first tag.
        """
        if not isinstance(triggers, list) or not triggers or not all(isinstance(e, str) and e for e in triggers):
            raise InvalidGrammar(f"{place} must be a list of non-empty texts")
        if len(tags) > MAX_TAGS:
            raise InvalidGrammar(f"{place}: there may be {MAX_TAGS} tags")
        by_trigger: dict[str, list[str]] = {}
        for tag, at in tags:
            begin = _text_of(_object(tag, at).get("begin"), f"{at}/begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise InvalidGrammar(f"no trigger begins {at}")
            rest = {"type": "tag", **tag, "begin": begin[len(trigger) :]}
            by_trigger.setdefault(trigger, []).append(self.format(rest, at, ("",), depth + 1))
        if any(one != other and one.startswith(other) for one in by_trigger for other in by_trigger):
            raise InvalidGrammar("a trigger must not begin with another")
        in_text, alone = [], []
        for trigger, bodies in by_trigger.items():
            body = self._rule(" | ".join(bodies))
            in_text.append(f"{self._until(trigger)} {body}")
            alone.append(f"{quoted(trigger)} {body}")
        some, direct = self._rule(" | ".join(in_text)), self._rule(" | ".join(alone))
        if once:
            return f"{direct} {_any_of(end)}" if first else f"({some} {_any_of(end)} | {self._text(end)})"
        return f"{direct if first else ''} {some}* {self._text(end)}"

    def _text(self, end: Sequence[str]) -> str:
        """Return Lark for free text up to and including one of the texts in `end`, or of any length if `end` has ""."""
        return "(" + " | ".join(self._until(text) if text else "TEXT" for text in end) + ")"

    def _until(self, text: str) -> str:
        self._num_rules += 1
        self.rules.append(f"until_{self._num_rules}[lazy]: TEXT {quoted(text)}")
        return f"until_{self._num_rules}"

    def _rule(self, body: str) -> str:
        self._num_rules += 1
        self.rules.append(f"part_{self._num_rules}: {body}")
        return f"part_{self._num_rules}"


def _ends_freely(value: Any) -> bool:
    """Whether a format may end with free text. The format must already be checked."""
    kind = value["type"]
    if kind == "sequence":
        return _ends_freely(value["elements"][-1])
    if kind == "or":
        return any(map(_ends_freely, value["elements"]))
    if kind == "tag":
        return value["end"] in ("", [""]) and _ends_freely(value["content"])
    return kind in ("any_text", "triggered_tags")


def _any_of(texts: Sequence[str]) -> str:
    if list(texts) == [""]:
        return ""
    return "(" + " | ".join(quoted(text) for text in texts) + ")"


def _list(value: Mapping[str, Any], key: str, place: str) -> list[Any]:
    items = value[key]
    if not isinstance(items, list) or not items:
        raise InvalidGrammar(f"{place}/{key} must be a list that is not empty")
    return items


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidGrammar(f"{place} must be an object")
    return value


def _text_of(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidGrammar(f"{place} must be a text")
    return value
