"""The memory of weights and caches: release it to the system, back it up in a file, and compute checksums."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

PIECE_BYTES = 64 * 2**20


class MemoryFile:
    """A backup of tensors in an unnamed temporary file, which disappears when it is closed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Write the tensors. Raises OSError if the folder for temporary files (TMPDIR) has too little space."""
        self._tensors = list(distinct(tensors))
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="penstock-weights-", buffering=0)  # noqa: SIM115
        try:
            for tensor in self._tensors:
                for piece in content(tensor).split(PIECE_BYTES):
                    rest = memoryview(_array(piece.cpu()))
                    while rest:
                        rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())  # so that the system can drop the file's pages from the page cache
        except BaseException:
            self._file.close()
            raise

    def restore(self) -> None:
        """Copy the contents back to the same tensors. Raises OSError if the file cannot be read."""
        self._file.seek(0)
        for tensor in self._tensors:
            for piece in content(tensor).split(PIECE_BYTES):
                host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
                rest = memoryview(_array(host))
                while rest:
                    count = self._file.readinto(rest)  # type: ignore[attr-defined]
                    if not count:
                        raise OSError("the file of the weights ended early")
                    rest = rest[count:]
                if host is not piece:
                    piece.copy_(host)

    def close(self) -> None:
        self._file.close()


def distinct(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield the tensors, except empty ones and those that share the storage of an earlier tensor."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield tensor


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the tensors' storages in bytes. Weights packed by oneDNN have no readable storage."""
    tensors = list(tensors)
    packed = sum(each.nbytes for each in tensors if each.is_mkldnn)
    plain = distinct(each for each in tensors if not each.is_mkldnn)
    return packed + sum(each.untyped_storage().nbytes() for each in plain)


def release(tensors: Iterable[Tensor]) -> int:
    """Release the memory of the tensors to the system, and return its size in bytes. The contents are lost.

    On a CPU the addresses stay valid: a page holds zeros when it is accessed again. On a GPU the storages are empty
    until `reserve` is called. Raises OSError if the system refuses.
    """
    released = 0
    for tensor in list(distinct(tensors)):
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu":
            released += _release_pages(storage.data_ptr(), storage.nbytes())
        else:
            released += storage.nbytes()
            tensor.penstock_nbytes = storage.nbytes()  # type: ignore[attr-defined]
            storage.resize_(0)
    return released


def reserve(tensors: Iterable[Tensor]) -> None:
    """Allocate the storages that `release` emptied on a GPU, and fill them with zeros. Does nothing on a CPU."""
    for tensor in tensors:
        num_bytes = getattr(tensor, "penstock_nbytes", 0)
        if num_bytes and not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(num_bytes)
            content(tensor).zero_()


def checksums(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter, in the layout in which the kernels read it."""
    return {name: _checksum(parameter) for name, parameter in model.named_parameters() if parameter.numel()}


def combined(sums: Mapping[str, str]) -> str:
    """Return one checksum for the checksums of all parameters."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()


def fill_random(model: nn.Module) -> None:
    """Overwrite each byte of all parameters with a random number below 16, so that a check can find stale weights."""
    for tensor in distinct(parameter.data for parameter in model.parameters()):
        content(tensor).random_(0, 16)


def _array(memory: Tensor) -> Any:
    """Return a numpy array that shares the memory of the uint8 tensor."""
    return memory.numpy()


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for piece in content(tensor).split(PIECE_BYTES):
        digest.update(memoryview(_array(piece.cpu())))
    return digest.hexdigest()


def content(tensor: Tensor) -> Tensor:
    """Return the tensor's whole storage as uint8, without a copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _release_pages(address: int, size: int) -> int:
    """Release the pages that lie entirely within this memory, and return their size in bytes."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + size) // page * page
    if first >= end:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the system does not release memory")
    return end - first
