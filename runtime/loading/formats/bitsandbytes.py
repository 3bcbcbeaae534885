"""bitsandbytes: 4-bit codes of a table (nf4, fp4) with a scale per block, or 8 bits with a scale per output.

    weight uint8 [n / 2, 1]                 two codes per byte, the higher half first; blocks continue over rows. Or the
                                            same bytes as another dtype (bnb_4bit_quant_storage)
    weight.absmax                           float32 [blocks], or nested: uint8 codes
    weight.quant_map                        float32 [16]
    weight.nested_absmax, .nested_quant_map quantised absmax, to which `nested_offset` is added
    weight.quant_state.bitsandbytes__nf4    JSON: shape, blocksize, nested_blocksize, nested_offset
    weight int8 [O, I], SCB float32 [O]     weight = q * SCB / 127

Source: `QuantState.as_dict` and `Int8Params` of bitsandbytes.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import torch
from torch import Tensor

from ops.matmul.grouped import nibbles
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import look_up
from runtime.loading.formats.stored import Derived, Read, Stored, require

STATE = ".quant_state.bitsandbytes__"
MAX_STATE_BYTES = 2**16


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    derived = Derived()
    for name in stored.shapes:
        if STATE in name:
            _add_by_table(derived, stored, name.partition(STATE)[0], name)
        elif name.endswith(".SCB"):
            _add_integers(derived, stored, name.removesuffix(".SCB"))
        elif name.endswith(".weight_format"):
            derived.used.add(name)
    return derived


def _add_by_table(derived: Derived, stored: Stored, name: str, state_name: str) -> None:
    names = {part: f"{name}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
    require(stored, name, names["absmax"], names["quant_map"])
    nested = names["nested_absmax"] in stored.shapes
    if nested:
        require(stored, names["nested_quant_map"])
    shape, block, nested_block, offset = _state(stored, state_name)
    count = prod(shape)
    num_bytes = prod(stored.shapes[name]) * stored.dtypes[name].itemsize
    blocks = -(-count // block)
    sizes = {names["absmax"]: blocks, names["quant_map"]: 16}
    if nested:
        sizes |= {names["nested_absmax"]: -(-blocks // nested_block), names["nested_quant_map"]: 256}
    sizes_match = all(prod(stored.shapes[part]) == size for part, size in sizes.items())
    if not count <= num_bytes * 2 < count + 32 or not sizes_match:
        raise CheckpointError(f"{name} and its quant_state do not match.")

    def make(read: Read) -> Tensor:
        scales = read(names["absmax"]).flatten()
        if nested:
            inner = read(names["nested_absmax"]).flatten().float().repeat_interleave(nested_block)[: len(scales)]
            scales = look_up(scales, read(names["nested_quant_map"]).flatten()) * inner + offset
        codes = nibbles(read(name).contiguous().flatten().view(torch.uint8), high_first=True)[:count]
        numbers = look_up(codes, read(names["quant_map"]).flatten())
        return (numbers * scales.float().repeat_interleave(block)[:count]).view(shape)

    used = [name, state_name, names["absmax"], names["quant_map"]]
    derived.add(name, shape, used + ([names["nested_absmax"], names["nested_quant_map"]] if nested else []), make)


def _state(stored: Stored, name: str) -> tuple[tuple[int, ...], int, int, float]:
    """Return the weight's shape, block size, nested block size, and the offset of nested scales."""
    if prod(stored.shapes[name]) > MAX_STATE_BYTES:
        raise CheckpointError(f"{name} is not a quant_state: it is too large.")
    try:
        state: dict[str, Any] = json.loads(bytes(stored.read(name).to(torch.uint8).tolist()))
        fields = Fields(state, f"{name}: ")
        shape = tuple(int(size) for size in state["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} cannot be read: {error!r}.") from error
    if not shape or min(shape) < 1:
        raise fields.wrong("shape", "a list of sizes")
    offset = float(state.get("nested_offset") or 0.0)
    return shape, fields.integer("blocksize"), fields.optional_integer("nested_blocksize") or 1, offset


def _add_integers(derived: Derived, stored: Stored, layer: str) -> None:
    name, scale = f"{layer}.weight", f"{layer}.SCB"
    require(stored, name)
    if stored.shapes[scale] != stored.shapes[name][:1]:
        raise CheckpointError(f"{name} and {scale} do not match.")

    def make(read: Read) -> Tensor:
        return read(name).float() * (read(scale).float() / 127).unsqueeze(-1)

    derived.add(name, stored.shapes[name], [name, scale], make)
