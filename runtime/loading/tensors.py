"""Read a checkpoint's tensors, whole or in parts, and release memory after reading."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol, TypeVar
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.loading.checkpoint import NUMPY_FOLDER, StoredTensor, WeightFiles, read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_Item = TypeVar("_Item")
MAX_FILES = 5  # maximum number of files listed in one error
MAX_MAPPED_BYTES = 16 * 2**20  # mapped pages are released after this many bytes have been read

Cut = tuple[slice, ...]  # the part of a tensor to read; (): the whole tensor
Cuts = Mapping[str, Sequence[Cut]]  # tensor name -> parts to read
# A function that receives a tensor's name, the index of the part in its cuts, and the part.
Take = Callable[[str, int, Tensor], None]


class Tensors(Protocol):
    """Tensors of a checkpoint by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Read each part that `cuts` lists, and call `take(name, index, part)` with it.

        `index` is the part's index in `cuts[name]`. With several threads, `take` is called concurrently.
        """
        ...


def give_parts(take: Take, cuts: Cuts, name: str, tensor: Tensor) -> None:
    """Call `take(name, index, part)` for each part of this tensor that `cuts` lists, if any."""
    for number, cut in enumerate(cuts.get(name, ())):
        take(name, number, tensor[cut])


class FileBytes:
    """The contents of a file, which is memory-mapped or read on demand. Thread-safe."""

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        self._path = path
        self._mapped = mapped
        self._map: mmap.mmap | None = None

    def read(self, begin: int, end: int) -> Tensor:
        """Return the bytes as uint8 [end - begin]."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapped:
            return torch.from_numpy(np.frombuffer(self._open(), np.uint8, end - begin, begin))
        content = torch.empty(end - begin, dtype=torch.uint8)
        rest = memoryview(content.numpy().data)
        with self._path.open("rb", buffering=0) as stream:
            stream.seek(begin)
            while rest and (count := stream.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise CheckpointError(f"{self._path} became shorter while it was read.")
        return content

    def release(self) -> None:
        """Release mapped pages, which count as memory of this process. Later accesses read them again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _open(self) -> mmap.mmap:
        if self._map is None:
            with self._path.open("rb") as stream:  # a private mapping, which is never written
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map


class TensorFiles:
    """Tensors of a checkpoint by name. Shapes are read at once, contents on demand.

    With `mmap`, safetensors files are memory-mapped instead of read. torch files are always mapped, except files of old
    torch versions, which are read whole. `rename` returns the new name of a stored tensor, or None to skip it. Raises
    CheckpointError if a file is damaged or a name occurs in two files.
    """

    def __init__(
        self,
        weights: WeightFiles,
        *,
        mmap: bool = True,
        rename: Callable[[str], str | None] = lambda stored: stored,
    ) -> None:
        self.files = weights.files
        self._readers = _readers(weights, mmap)
        self._stored: dict[str, str] = {}  # name after `rename` -> name in the file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reader_of: dict[str, _Reader] = {}
        for reader in self._readers:
            for stored, shape in reader.shapes.items():
                name = rename(stored)
                if name is None:
                    continue
                if name in self.shapes:
                    raise CheckpointError(f"The tensor {name} is in two weight files.")
                self._stored[name] = stored
                self.shapes[name] = shape
                self._reader_of[name] = reader

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """dtype of each tensor. Raises CheckpointError for dtypes that are not supported."""
        return {name: reader.dtype(self._stored[name]) for name, reader in self._reader_of.items()}

    def where(self, names: Sequence[str]) -> str:
        """Return the end of an error text: ", in FILES", and the tensors' stored names if these differ from `names`.

        If one of the tensors is missing, all files are listed.
        """
        paths = {self._reader_of[name].path if name in self._reader_of else None for name in names}
        files = self.files if None in paths else [file for file in paths if file is not None]
        listed = ", ".join(str(file) for file in sorted(files)[:MAX_FILES])
        more = f" and {len(files) - MAX_FILES} more" if len(files) > MAX_FILES else ""
        aliases = [self._stored[name] for name in names if self._stored.get(name, name) != name][:MAX_FILES]
        return f", in {listed}{more}" + (f" (called {', '.join(aliases)} there)" if aliases else "")

    def read(self, name: str, cut: Cut = ()) -> Tensor:
        """Return a tensor, or the part of it that `cut` selects."""
        return self._reader_of[name].read(self._stored[name], cut)

    def release(self) -> None:
        """Release the pages that were read."""
        for reader in self._readers:
            reader.release()

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Read each part that `cuts` lists, and call `take(name, index, part)`; see `Tensors.read_all`."""

        mapped = 0

        def read_part(part: tuple[str, int, Cut]) -> None:
            nonlocal mapped
            name, number, cut = part
            content = self.read(name, cut)
            take(name, number, content)
            mapped += content.nbytes
            if mapped > MAX_MAPPED_BYTES:
                mapped = 0
                self.release()

        in_order = sorted(cuts, key=lambda name: self._readers.index(self._reader_of[name]))
        for_each(
            read_part,
            [(name, number, cut) for name in in_order for number, cut in enumerate(cuts[name])],
            num_threads,
        )
        self.release()


def for_each(do: Callable[[_Item], None], items: Iterable[_Item], num_threads: int) -> None:
    """Call `do` for each item, on this thread or on several, and raise the first error."""
    if num_threads <= 1:
        for item in items:
            do(item)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        list(pool.map(do, items))


class _RawTensors:
    """Tensors stored as raw bytes: in a safetensors file, or in one numpy file each."""

    def __init__(self, path: Path, entries: Mapping[str, tuple[FileBytes, StoredTensor]]) -> None:
        self.path = path
        self._entries = entries
        self._contents = {content for content, _ in entries.values()}
        self.shapes = {name: entry.shape for name, (_, entry) in entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        _, entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has the dtype {entry.dtype}, which is not supported.")
        return DTYPES[entry.dtype]

    def read(self, name: str, cut: Cut) -> Tensor:
        content, entry = self._entries[name]
        dtype, (num_rows, *inner) = self.dtype(name), entry.shape or (1,)
        rows = cut[0] if cut else slice(0, num_rows)
        row_bytes = (entry.end - entry.begin) // max(1, num_rows)
        read = content.read(entry.begin + rows.start * row_bytes, entry.begin + rows.stop * row_bytes)
        if not entry.shape:
            return read.view(dtype)[0]
        return read.view(dtype).view(rows.stop - rows.start, *inner)[(slice(None), *cut[1:])]

    def release(self) -> None:
        for content in self._contents:
            content.release()


class _TorchFile:
    """A file of torch.save, read without executing code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = is_zipfile(path)  # only zip files can be mapped; old torch versions wrote another format
        self._loaded: Mapping[str, Tensor] | None = self._load()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._loaded.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in self._loaded.items()}
        if not self._mapped:
            self._loaded = None  # the next read loads the file again

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def read(self, name: str, cut: Cut) -> Tensor:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded[name][cut] if cut else self._loaded[name]

    def release(self) -> None:
        for tensor in (self._loaded or {}).values() if self._mapped else ():
            storage = tensor.untyped_storage()
            _release(storage.data_ptr(), storage.nbytes())

    def _load(self) -> Mapping[str, Tensor]:
        try:
            tensors = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"{self.path} cannot be read as weights.{_pickle_hint(error)}") from error
        plain = (Tensor, torch.nn.Parameter)
        if not isinstance(tensors, Mapping) or not all(type(x) in plain for x in tensors.values()):
            raise CheckpointError(f"{self.path} must contain a dictionary of tensors and nothing else.")
        return tensors


def _pickle_hint(error: Exception) -> str:
    """Return a sentence about the class that a pickle needs (for example from torchao), or "" if none is named."""
    match = re.search(r"GLOBAL ((?:\w+\.)+\w+)", str(error))
    return (
        f" It contains objects of {match[1]}, which are not loaded from pickles. Save the model as safetensors with "
        "the library that wrote it."
        if match
        else ""
    )


_Reader = _RawTensors | _TorchFile


def _readers(weights: WeightFiles, mapped: bool) -> Sequence[_Reader]:
    if weights.format == "npcache":
        folder = weights.files[0].parent / NUMPY_FOLDER
        return [_RawTensors(folder, _numpy_entries(folder, weights.files, mapped))]
    if weights.format == "pt":
        return [_TorchFile(file) for file in weights.files]
    readers: list[_Reader] = []
    for file in weights.files:
        content = FileBytes(file, mapped=mapped)
        readers.append(_RawTensors(file, {name: (content, entry) for name, entry in read_header(file).items()}))
    return readers


def _numpy_entries(folder: Path, files: Sequence[Path], mapped: bool) -> dict[str, tuple[FileBytes, StoredTensor]]:
    """Return the tensors of the numpy folder. Writes the folder first if it does not match the torch files."""
    source = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    index = folder / "index.json"
    try:
        cached = json.loads(index.read_text(encoding="utf-8"))
        if cached["source"] != source:
            raise ValueError("written from other files")
    except (OSError, ValueError, KeyError, TypeError):
        _write_numpy(folder, files, source)
        cached = json.loads(index.read_text(encoding="utf-8"))
    entries = {}
    for number, (name, (dtype, shape)) in enumerate(cached["tensors"].items()):
        file = folder / f"{number:05d}.npy"
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        begin = file.stat().st_size - array.nbytes
        entry = StoredTensor(dtype, tuple(shape), begin, begin + array.nbytes)
        entries[name] = FileBytes(file, mapped=mapped), entry
    return entries


def _write_numpy(folder: Path, files: Sequence[Path], source: Mapping[str, object]) -> None:
    """Write a temporary folder and rename it, because other ranks and processes may write it at the same time."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    temporary, tensors = folder.with_name(f"{folder.name}.{os.getpid()}"), {}
    try:
        temporary.mkdir()
        for file in map(_TorchFile, files):
            for name, shape in file.shapes.items():
                content = file.read(name, ()).contiguous().view(-1).view(torch.uint8)
                np.save(temporary / f"{len(tensors):05d}.npy", content.numpy(), allow_pickle=False)
                tensors[name] = [names[file.dtype(name)], shape]
                file.release()
        (temporary / "index.json").write_text(json.dumps({"source": source, "tensors": tensors}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, KeyError) as error:
        if not (folder / "index.json").is_file():  # another process may have written the folder meanwhile
            raise CheckpointError(f"--load-format npcache cannot write {folder}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def give_back_freed() -> None:
    """Return freed heap memory to the operating system. The C library would keep the many small blocks of a layer."""
    with suppress(AttributeError):  # some C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _release(address: int, size: int) -> None:
    """Release the pages that lie entirely within this read-only mapped memory."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + size) // page * page
    if first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
