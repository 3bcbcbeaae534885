"""Reading a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.models.checkpoint import StoredTensor, WeightFiles, read_header

_DTYPES = {
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


Cut = tuple[slice, ...]  # what to read of a tensor; () for all of it
Cuts = Mapping[str, Sequence[Cut]]  # tensor name -> the parts that are wanted


class TensorFiles:
    """The tensors of a checkpoint by name: shapes known at once, contents read one at a time.

    With `mmap` the pages of the files are mapped, without it each tensor is read with plain reads. Raises
    CheckpointError for a damaged file and for a name that occurs in two files. `rename` gives what a stored tensor is
    called here, or None for one that is passed over.
    """

    def __init__(
        self,
        weights: WeightFiles,
        *,
        mmap: bool = True,
        rename: Callable[[str], str | None] = lambda stored: stored,
    ) -> None:
        self._mmap = mmap
        self._stored: dict[str, str] = {}  # a tensor's name here -> that in its file
        self._files: Sequence[_File] = [
            _SafetensorsFile(file) if weights.format == "safetensors" else _TorchFile(file)
            for file in weights.files
        ]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, _File] = {}
        for file in self._files:
            for stored, shape in file.shapes().items():
                name = rename(stored)
                if name is None:
                    continue
                if name in self.shapes:
                    raise CheckpointError(f"The tensor {name} stands in two weight files.")
                self._stored[name] = stored
                self.shapes[name] = shape
                self._file_of[name] = file

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor by its name. Raises CheckpointError for one that cannot be read."""
        return {name: file.dtype(self._stored[name]) for name, file in self._file_of.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, whole."""
        return self._file_of[name].read(self._stored[name], mmap=self._mmap)

    def read_all(
        self, take: Callable[[str, Sequence[Tensor]], None], cuts: Cuts, num_threads: int = 1
    ) -> None:
        """Give the parts of each tensor that `cuts` names to `take`, on this thread or, file by file, on several.

        Of a cut tensor only those parts are read, or, where a file cannot be read in parts, held on to.
        """

        names = {self._stored[name]: name for name in cuts}
        stored_cuts = {stored: cuts[name] for stored, name in names.items()}

        def read(file: _File) -> None:
            for stored, parts in file.tensors(stored_cuts, mmap=self._mmap):
                take(names[stored], parts)

        if num_threads <= 1:
            for file in self._files:
                read(file)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
            list(pool.map(read, self._files))


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = read_header(path)
        self._mapped: np.memmap | None = None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._header.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype(name, self._header[name])

    def read(self, name: str, *, mmap: bool) -> Tensor:
        entry = self._header[name]
        if mmap:
            if self._mapped is None:
                self._mapped = np.memmap(self._path, np.uint8, mode="c")  # private: nothing is ever written
            content = self._mapped[entry.begin : entry.end]
            return torch.from_numpy(content).view(self._dtype(name, entry)).view(entry.shape)
        with self._path.open("rb") as stream:
            stream.seek(entry.begin)
            return self._decode(name, entry, bytearray(stream.read(entry.end - entry.begin)))

    def tensors(self, cuts: Cuts, *, mmap: bool) -> Iterator[tuple[str, list[Tensor]]]:
        wanted = {name: entry for name, entry in self._header.items() if name in cuts}
        if mmap:
            with safe_open(self._path, framework="pt") as tensors:
                for name in wanted:
                    stored = tensors.get_slice(name)
                    yield name, [stored[cut] if cut else tensors.get_tensor(name) for cut in cuts[name]]
            return
        with self._path.open("rb") as stream:
            for name, entry in wanted.items():
                stream.seek(entry.begin)
                content = bytearray(stream.read(entry.end - entry.begin))
                tensor = self._decode(name, entry, content)
                yield name, [tensor[cut] for cut in cuts[name]]

    def _dtype(self, name: str, entry: StoredTensor) -> torch.dtype:
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{self._path}: {name} has the dtype {entry.dtype}, which cannot be read.")
        return _DTYPES[entry.dtype]

    def _decode(self, name: str, entry: StoredTensor, content: bytearray) -> Tensor:
        return torch.frombuffer(content, dtype=self._dtype(name, entry)).view(entry.shape)


class _TorchFile:
    """A file of torch.save, read without executing anything in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        loaded = self._load(mmap=True)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in loaded.items()}
        self._loaded: Mapping[str, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def read(self, name: str, *, mmap: bool) -> Tensor:
        if self._loaded is None:
            self._loaded = self._load(mmap)
        return self._loaded[name]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def tensors(self, cuts: Cuts, *, mmap: bool) -> Iterator[tuple[str, list[Tensor]]]:
        for name, tensor in self._load(mmap).items():
            if name in cuts:
                yield name, [tensor[cut] for cut in cuts[name]]

    def _load(self, mmap: bool) -> Mapping[str, Tensor]:
        mmap = mmap and is_zipfile(self._path)  # files of old torch versions cannot be mapped
        try:
            tensors = torch.load(self._path, map_location="cpu", weights_only=True, mmap=mmap)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"{self._path} cannot be read as weights.") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(x, Tensor) for x in tensors.values()):
            raise CheckpointError(f"{self._path} must hold a table of tensors and nothing else.")
        return tensors


_File = _SafetensorsFile | _TorchFile
