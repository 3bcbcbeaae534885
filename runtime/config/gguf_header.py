"""Reads the header of a GGUF file: the model's metadata, and the position of each tensor.

Versions 2 and 3 in little-endian byte order are supported. A file contains, in this order: the magic bytes, the
version, the number of tensors, the number of metadata values; the metadata values with their names; the name, shape
(innermost dimension first), type and offset of each tensor; the tensors' content, aligned. Source: the GGUF
specification of the ggml project.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import CheckpointError

MAGIC = b"GGUF"
ALIGNMENT = 32
MAX_ENTRIES = 2**20  # maximum number of tensors, and of metadata values
MAX_KEPT = 2**21  # maximum length of a list; vocabularies are the longest lists
MAX_DEPTH = 4  # maximum depth of nested lists
MAX_FILES = 1000
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _LIST = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Kind(NamedTuple):
    """A storage type: a block of `bytes` bytes stores `numbers` values."""

    name: str
    numbers: int
    bytes: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
}


class GgufTensor(NamedTuple):
    """Place of a tensor (bytes `begin` to `end` of `file`), its type and its shape."""

    file: Path
    kind: Kind
    shape: tuple[int, ...]  # in PyTorch's order, the reverse of the file's
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file, or the joined headers of all parts of a split file."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family. Raises CheckpointError if the header has none."""
        found = self.values.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(f"{self.path} does not say which architecture it holds.")
        return found


def is_gguf(path: Path | str) -> bool:
    """Return whether a model's path names an existing GGUF file."""
    return str(path).endswith(".gguf") and Path(path).is_file()


def read_header(path: Path, *, texts: bool = True) -> GgufHeader:
    """Read the header of a GGUF file. If the file is the first of several parts, also read the other parts.

    If `texts` is False, lists of strings such as the vocabulary become empty, which saves tens of megabytes. Raises
    CheckpointError if a file is missing, cannot be read, is not a GGUF file, or is damaged or truncated.
    """
    first = _read_file(path, texts)
    count = first.values.get("split.count") or 1
    if count == 1:
        return first
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count or not 1 < count <= MAX_FILES:
        raise CheckpointError(f"{path} is one of {count} files, which must be called NAME-00001-of-{count:05}.gguf.")
    if int(named[2]) != 1:
        raise CheckpointError(f"{path} is a later part: name the first, {named[1]}-00001-of-{named[3]}.gguf.")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf")
        tensors |= _read_file(part, texts=False).tensors
    return GgufHeader(path, first.values, tensors)


def _read_file(path: Path, texts: bool) -> GgufHeader:
    try:
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise CheckpointError(f"{path} is no GGUF file.")
            content = mmap(stream.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    with content:
        try:
            return _parse(path, _Cursor(content, texts))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path} is cut off or has a damaged header ({error}).") from error


class _Cursor:
    """Reads values sequentially. Raises ValueError for impossible counts."""

    def __init__(self, content: mmap, texts: bool) -> None:
        self.content = content
        self.texts = texts
        self.at = len(MAGIC)

    def number(self, form: str) -> Any:
        value = struct.unpack_from(form, self.content, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def count(self, what: str, limit: int) -> int:
        value = self.number("<Q")
        if value > limit:
            raise ValueError(f"{value} {what}")
        return value

    def string(self) -> str:
        size = self.count("bytes of text", len(self.content) - self.at)
        self.at += size
        return self.content[self.at - size : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _LIST and depth < MAX_DEPTH:
            return self._list(depth)
        if kind not in _SCALARS:
            raise ValueError(f"a value of kind {kind}")
        return self.number(_SCALARS[kind])

    def _list(self, depth: int) -> list[Any]:
        kind = self.number("<I")
        count = self.count("entries", MAX_KEPT)
        if kind == _STRING and not self.texts:
            for _ in range(count):
                size = self.count("bytes of text", len(self.content) - self.at)
                self.at += size
            return []
        if kind not in _SCALARS:
            return [self.value(kind, depth + 1) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind][1]}"
        values = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return list(values)


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.number("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path} is of GGUF version {version}; versions 2 and 3 are read (little-endian).")
    num_tensors, num_values = (cursor.count(what, MAX_ENTRIES) for what in ("tensors", "values"))
    values: dict[str, Any] = {}
    for _ in range(num_values):
        name = cursor.string()
        values[name] = cursor.value(cursor.number("<I"))
    entries = [_entry(path, cursor) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise ValueError(f"an alignment of {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in entries:
        begin = start + offset
        end = begin + math.prod(shape) // kind.numbers * kind.bytes
        if name in tensors:
            raise ValueError(f"{name} is there twice")
        if end > len(cursor.content):
            raise ValueError(f"{name} ends at byte {end} of {len(cursor.content)}")
        tensors[name] = GgufTensor(path, kind, shape, begin, end)
    return GgufHeader(path, values, tensors)


def _entry(path: Path, cursor: _Cursor) -> tuple[str, Kind, tuple[int, ...], int]:
    name, num_dims = cursor.string(), cursor.number("<I")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"{name} has {num_dims} dimensions")
    shape = tuple(reversed([cursor.count("entries of a dimension", 2**40) for _ in range(num_dims)]))
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in KINDS:
        raise CheckpointError(
            f"{path}: {name} holds numbers of kind {number}, which is not supported; use a file in one of "
            f"{', '.join(kind.name for kind in KINDS.values())}."
        )
    kind = KINDS[number]
    if shape[-1] % kind.numbers:
        raise ValueError(f"{name} has rows of {shape[-1]}, no multiple of {kind.numbers}")
    return name, kind, shape, offset
