"""Tensors in memory with the interface of checkpoint files, and readers of safetensors bytes and flat tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import InvalidRequest
from runtime.loading.tensors import DTYPES, Cut, Cuts, Take, for_each, give_parts

FLATTENED = "flattened_tensor"  # name of the one tensor of a flattened bucket
PICKLE = (
    "The tensors are pickled, and pickles are never loaded. Send base64 of safetensors bytes "
    '(safetensors.torch.save); for load_format "flattened_bucket", one tensor flattened_tensor and the list of parts '
    "as JSON in the metadata."
)


class MemoryTensors:
    """Tensors by name, with the interface of `runtime.loading.tensors.TensorFiles`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, cut: Cut = ()) -> Tensor:
        """Return a tensor, or the part of it that `cut` selects."""
        return self._tensors[name][cut]

    def release(self) -> None:
        """Do nothing, because the tensors belong to the caller."""

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Call `take(name, index, part)` for each part that `cuts` lists."""
        for_each(lambda name: give_parts(take, cuts, name, self._tensors[name]), cuts, num_threads)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`, for example "bfloat16" or "torch.bfloat16".

    Raises `InvalidRequest` if weights cannot have a dtype with this name.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise InvalidRequest(f"{name[:80]} is not a dtype of weights, for example bfloat16.", param="dtypes")
    return found


def parse_safetensors(content: bytes, *, flattened: bool = False) -> dict[str, Tensor]:
    """Return the tensors in safetensors bytes. Split a `flattened` bucket into the tensors that its metadata lists.

    All tensors share one copy of the content. Raises `InvalidRequest` for pickles and damaged content.
    """
    if content[:1] == b"\x80" or content[:2] == b"PK":
        raise InvalidRequest(PICKLE, param="serialized_named_tensors")
    try:
        header, tensors = _parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error, RecursionError) as error:
        raise InvalidRequest(
            "The tensors are not valid safetensors bytes.", param="serialized_named_tensors"
        ) from error
    if not flattened:
        return tensors
    try:
        parts = json.loads(header.get("__metadata__", {})["metadata"])
        return unflatten(tensors[FLATTENED], [(part["name"], part["dtype"], part["shape"]) for part in parts])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f'A flattened bucket has one tensor {FLATTENED}, and in its safetensors metadata the key "metadata" with a '
            "JSON list of objects with name, dtype and shape, in the order of the parts.",
            param="serialized_named_tensors",
        ) from error


def _parse(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (size,) = struct.unpack_from("<Q", content)
    if size > len(content) - 8:
        raise ValueError("the header is longer than the content")
    header = json.loads(content[8 : 8 + size])
    data = torch.frombuffer(bytearray(memoryview(content)[8 + size :]) or bytearray(1), dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        if not 0 <= begin <= end <= len(content) - 8 - size:
            raise ValueError(f"{name} lies outside the content")
        tensors[name] = _viewed(data[begin:end], dtype, entry["shape"])
    return header, tensors


def unflatten(flat: Tensor, parts: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, Tensor]:
    """Split a flat tensor into its parts (name, dtype, shape), which follow each other without gaps.

    Raises `InvalidRequest` if the sizes of the parts do not add up to the size of the tensor.
    """
    content, tensors, begin = flat.contiguous().view(-1).view(torch.uint8), {}, 0
    for name, dtype_name, shape in parts:
        dtype = dtype_of(dtype_name)
        end = begin + num_bytes(shape, dtype)
        if end > len(content):
            raise InvalidRequest("The flattened tensor is shorter than its parts.", param="shapes")
        tensors[name] = _viewed(content[begin:end], dtype, shape)
        begin = end
    if begin != len(content):
        raise InvalidRequest("The flattened tensor is longer than its parts.", param="shapes")
    return tensors


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes. Raises `InvalidRequest` for a negative dimension."""
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise InvalidRequest("Sizes must be integers of at least 0.", param="shapes")
        count *= size
    return count * dtype.itemsize


def _viewed(content: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if len(content) != num_bytes(shape, dtype):
        raise ValueError("a tensor's size differs from its shape")
    if content.storage_offset() % dtype.itemsize:
        content = content.clone()  # a view with this dtype must begin at an aligned address
    return content.view(dtype).view(*shape)
