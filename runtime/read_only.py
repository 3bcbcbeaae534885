"""A class decorator for values that are created in every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def read_only(cls: type[T]) -> type[T]:
    """Make a class of values that must not be changed, and that are compared by identity.

    Only type checkers enforce this. A frozen dataclass also refuses assignments at run time, which makes creating an
    object three times as slow.
    """
    return dataclass(slots=True, eq=False)(cls)
