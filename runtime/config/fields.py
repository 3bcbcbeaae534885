"""Reads and checks values of JSON objects. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import CheckpointError


class Fields:
    """One JSON object whose fields are read and checked. A field with the value null counts as missing.

    The methods raise CheckpointError if a required field is missing, or if a value has the wrong type or is out of
    range. The error message begins with `path` and the field's name.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def integer(self, name: str, *, low: int = 1) -> int:
        return self._required(name, self.optional_integer(name, low=low))

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise self.wrong(name, f"an integer of at least {low}")
        return value

    def number(self, name: str) -> float:
        return self._required(name, self.optional_number(name))

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not math.isfinite(value) or value <= above:
            raise self.wrong(name, f"a number above {above:g}")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        values = self._required(name, self.values.get(name))
        if not isinstance(values, list) or len(values) != length:
            raise self.wrong(name, f"a list of {length} numbers")
        each = Fields({f"{name}[{i}]": value for i, value in enumerate(values)}, self.path)
        return tuple(each.number(entry) for entry in each.values)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, known: Sequence[str], *, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if value not in known:
            raise self.wrong(name, f"one of {', '.join(known)}")
        return value

    def child(self, name: str) -> Fields:
        """Return the object under `name`, or an empty one."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.path}{name}.")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Return the error for an invalid value."""
        return CheckpointError(f"{self.path}{name} must be {expected}, not {self.values.get(name)!r}.")

    def _required(self, name: str, value: Any) -> Any:
        if value is None:
            raise CheckpointError(f"{self.path}{name} is missing.")
        return value
