"""Operands of the kernels as ctypes structures. Their fields are parsed from the C++ headers in `source/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ctypes import Structure, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

from ops.cpp.build import SOURCES

_NUMBERS = {"int64_t": c_int64, "int32_t": c_int32, "float": c_float, "double": c_double, "bool": c_bool}
_COMMENT = re.compile(r"//[^\n]*")
_STRUCTURE = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_ENUM = re.compile(r"^enum (?:class )?(\w+) : (\w+)", re.MULTILINE)
_POINTER = re.compile(r"(?:const )?\w+\* (\w+)")
_FUNCTION = re.compile(r"void \(\*(\w+)\)\([^()]*\)")
_VALUES = re.compile(r"(\w+) (\w+(?:, \w+)*)")


class Declarations:
    """The structures that some C++ code declares."""

    def __init__(self, code: str) -> None:
        self._bodies = dict(_STRUCTURE.findall(code))
        self._numbers = _NUMBERS | {name: _NUMBERS[base] for name, base in _ENUM.findall(code)}

    def __contains__(self, structure: str) -> bool:
        return structure in self._bodies

    def fields(self, structure: str, known: Mapping[str, type[Structure]]) -> list[tuple[str, Any]]:
        """Return (name, ctypes type) of each field, in order. The type of a field may be one of the `known` structures.

        Raises ValueError if a declaration cannot be parsed.
        """
        fields: list[tuple[str, Any]] = []
        for declaration in _COMMENT.sub("", self._bodies[structure]).split(";"):
            text = " ".join(declaration.split())
            if pointer := _POINTER.fullmatch(text) or _FUNCTION.fullmatch(text):
                fields.append((pointer[1], c_void_p))
            elif text:
                values = _VALUES.fullmatch(text)
                kind = values and (self._numbers.get(values[1]) or known.get(values[1]))
                if values is None or kind is None:
                    raise ValueError(f"Cannot parse the declaration '{text}' in the structure {structure}.")
                fields += [(name, kind) for name in values[2].split(", ")]
        return fields


_HEADERS = Declarations("\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.h"))))
STRUCTURES: dict[str, type[Structure]] = {}  # by name in C++


class _Declared(type(Structure)):
    """Metaclass that gives a class the fields of its C++ structure. Instances have no other attributes."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        namespace["__slots__"] = ()
        if bases == (Structure,):
            return super().__new__(cls, name, bases, namespace)
        structure = f"{name}Operands" if f"{name}Operands" in _HEADERS else name
        namespace["_fields_"] = _HEADERS.fields(structure, STRUCTURES)
        declared: Any = super().__new__(cls, name, bases, namespace)
        STRUCTURES[structure] = declared
        return declared


class Operands(Structure, metaclass=_Declared):
    """Base class of C++ structures. `class Norm` has the fields of `NormOperands`, and `class Step` those of `Step`."""

    if TYPE_CHECKING:  # Pyright accepts keywords only, so no code depends on the order of fields

        def __init__(self, **fields: Any) -> None: ...


class Step(Operands): ...


class GraphNode(Operands): ...


class Media(Operands): ...


class Embed(Operands): ...


class Norm(Operands): ...


class Add(Operands): ...


class Rotate(Operands): ...


class Angles(Operands): ...


class Store(Operands): ...


class CopyPages(Operands): ...


class RotateStore(Operands): ...


class Gate(Operands): ...


class Attend(Operands): ...


class AttendBidirectional(Operands): ...


class Pack(Operands): ...


class Product(Operands): ...


class Pack8(Operands): ...


class Product8(Operands): ...


class Product4(Operands): ...


class Pack4(Operands): ...


class Begin(Operands): ...


class Last(Operands): ...


class Choose(Operands): ...


class Route(Operands): ...


class PairTable(Operands): ...


class Dispatch(Operands): ...


class Experts(Operands): ...


class Combine(Operands): ...


class Convolve(Operands): ...


class Recur(Operands): ...


class ProductHeads(Operands): ...


class CopyHeads(Operands): ...


class EmbedGroups(Operands): ...


class Draw(Operands): ...


class Score(Operands): ...


class PoolRows(Operands): ...


class AddLowRank(Operands): ...


class AttendExpanded(Operands): ...
