"""The ctypes structures equal those of the headers."""

from __future__ import annotations

import ctypes
import re

import pytest

from cpp_kernels import library
from ops.cpp import structures
from ops.cpp.build import SOURCES
from ops.cpp.library import _Size, check_sizes
from ops.cpp.structures import STRUCTURES, Declarations, Draw, Norm

HEADER = """
enum Kind : int64_t { A, B };
struct PairTable {
    int32_t* unused;
};
struct Example {
    const float* x;   // [T], a pointer; with a comment
    int64_t rows, size;
    Kind kind;
    PairTable table;
    void (*kernel)(const void* operands, const Step& step);
    bool last;
};
"""


def test_fields_are_read_in_the_order_of_the_header() -> None:
    fields = Declarations(HEADER).fields("Example", STRUCTURES)
    assert [name for name, _ in fields] == ["x", "rows", "size", "kind", "table", "kernel", "last"]
    kinds = [kind for _, kind in fields]
    assert kinds[:4] == [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    assert kinds[4:] == [structures.PairTable, ctypes.c_void_p, ctypes.c_bool]


def test_another_order_in_the_header_moves_the_fields() -> None:
    headers = (SOURCES / "small.h").read_text()
    first, second = "    void* residual;", "    int64_t tokens;"
    [norm] = re.findall(r"struct NormOperands \{.*?\n\};", headers, re.DOTALL)
    lines = {line.split(";")[0] + ";": line for line in norm.splitlines()}
    swapped = norm.replace(lines[first], "@").replace(lines[second], lines[first]).replace("@", lines[second])

    class Moved(ctypes.Structure):
        _fields_ = Declarations(headers.replace(norm, swapped)).fields("NormOperands", STRUCTURES)

    assert Moved.tokens.offset == Norm.residual.offset
    assert Moved.residual.offset == Norm.tokens.offset
    assert bytes(Moved(tokens=7)) != bytes(Norm(tokens=7))


@pytest.mark.parametrize("field", ["long rows", "float x[4]", "std::vector<float> x", "Unknown kind", "int a"])
def test_a_declaration_of_an_unknown_form_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match="in the structure Example"):
        Declarations(HEADER.replace("bool last", field)).fields("Example", STRUCTURES)


def test_a_structure_that_the_headers_lack_is_an_error() -> None:
    with pytest.raises(KeyError, match="Missing"):

        class Missing(structures.Operands): ...


def test_operands_have_no_field_that_the_headers_lack() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        Draw(tokens=1)


def test_the_library_must_have_the_sizes_of_the_headers() -> None:
    library()  # checks the structures when it is loaded
    sizes = {name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()}
    check_sizes([_Size(name.encode(), size) for name, size in sizes.items()])
    sizes["StoreOperands"] += 8
    with pytest.raises(RuntimeError, match="StoreOperands has .* bytes in Python and .* in the kernels"):
        check_sizes([_Size(name.encode(), size) for name, size in sizes.items()])
    del sizes["StoreOperands"]
    with pytest.raises(RuntimeError, match="and None in the kernels"):
        check_sizes([_Size(name.encode(), size) for name, size in sizes.items()])
