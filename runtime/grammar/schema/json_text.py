"""Parse JSON from clients, with limits, and write JSON."""

from __future__ import annotations

import json
from typing import Any

from runtime.grammar_spec import InvalidGrammar

MAX_DEPTH = 96  # maximum depth of nested brackets


def parse(source: str) -> Any:
    """Parse a JSON text. Raises `InvalidGrammar` if it is not JSON or nested too deeply."""
    _check_depth(source)
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from None


def dumps(value: Any) -> str:
    """Return the value as ASCII JSON text. Names keep their order."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check_depth(source: str) -> None:
    """Raise `InvalidGrammar` for deep nesting. Must be called before a recursive parser runs."""
    if source.count("[") + source.count("{") <= MAX_DEPTH:
        return
    depth, in_string, escaped = 0, False, False
    for character in source:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidGrammar(f"the schema is nested more than {MAX_DEPTH} deep")
        elif character in "]}":
            depth -= 1
