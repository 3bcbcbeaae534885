"""AWQ: integers of 2 to 8 bits, packed in words along the outputs; a scale and a zero per group of inputs.

    qweight int32 [I, O * bits / 32]   lowest bits first, dense; 4 bits in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [G, O * bits / 32]   packed like qweight
    scales  float [G, O]

The gemv version packs words along the inputs, in order: qweight [O, I / 8], qzeros [O, at least G / 8] and scales
[O, at least G]; entries after the last group are unused.

weight[o, i] = scales[i / group_size, o] * (q[i, o] - zero[i / group_size, o]). Without zeros (`zero_point` false) the
zero is half the range. Source: AutoAWQ's "gemm" and "gemv" packing; GPTQModel's packing for other bit widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight, GroupForm, code_bits
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import unpack
from runtime.loading.formats.stored import Derived, Read, Stored, require

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each 4-bit field of a word, lowest bits first
POSITION = tuple(ORDER.index(output) for output in range(8))  # 4-bit field of each output


class Parts(NamedTuple):
    """Sizes of a weight [O, I], and functions that read its codes, scales and zero points."""

    out_size: int
    in_size: int
    groups: int
    codes: Callable[[Read], Tensor]  # [O, I]
    scales: Callable[[Read], Tensor]  # float32 [O, G]
    zeros: Callable[[Read], Tensor] | None  # [O, G]; None: half the range


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    bits = fields.optional_integer("bits") or fields.optional_integer("w_bit") or 4
    if not 2 <= bits <= 8:
        raise fields.wrong("bits", "from 2 to 8")
    version = str(fields.values.get("version") or "gemm").lower()
    if version not in ("gemm", "gemv") or (version == "gemv" and bits != 4):
        raise CheckpointError(
            f"{fields.path}version {version} with {bits} bits is not supported. Use a checkpoint with version gemm, or "
            "gemv with 4 bits."
        )
    derived, symmetric = Derived(), fields.values.get("zero_point") is False
    for name in stored.shapes:
        if name.endswith(".qweight"):
            layer = name.removesuffix(".qweight")
            names = (name, f"{layer}.scales", f"{layer}.qzeros")
            without_zeros = symmetric and names[2] not in stored.shapes
            require(stored, *names[: 2 if without_zeros else 3])
            if version == "gemm":
                parts = _for_gemm(stored, names, bits, without_zeros)
            else:
                parts = _for_gemv(stored, names, _group_size(fields), without_zeros)
            add(derived, f"{layer}.weight", names[: 2 if without_zeros else 3], parts, bits)
    return derived


def _group_size(fields: Fields) -> int:
    """Return the group size; 0 means one group per row."""
    name = "group_size" if "group_size" in fields.values else "q_group_size"
    return 0 if fields.values.get(name) == -1 else fields.integer(name)


def _for_gemm(stored: Stored, names: tuple[str, str, str], bits: int, without_zeros: bool) -> Parts:
    packed, scales, zeros = names
    in_size, words = stored.shapes[packed]
    groups, out_size = stored.shapes[scales]
    zeros_match = without_zeros or stored.shapes[zeros] == (groups, words)
    if words != -(-out_size * bits // 32) or in_size % groups or not zeros_match:
        raise CheckpointError(f"{packed} and {scales} do not match.")
    return Parts(
        out_size,
        in_size,
        groups,
        lambda read: _unpack(read(packed), bits, out_size).T,
        lambda read: read(scales).float().T,
        None if without_zeros else lambda read: _unpack(read(zeros), bits, out_size).T,
    )


def _for_gemv(stored: Stored, names: tuple[str, str, str], group_size: int, without_zeros: bool) -> Parts:
    packed, scales, zeros = names
    out_size, words = stored.shapes[packed]
    in_size = 8 * words
    groups = in_size // (group_size or in_size)
    rows, width = stored.shapes[scales]
    zeros_match = without_zeros or stored.shapes[zeros] == (rows, -(-width // 8))
    if rows != out_size or groups > width or groups * (group_size or in_size) != in_size or not zeros_match:
        raise CheckpointError(f"{packed} and {scales} do not match.")
    return Parts(
        out_size,
        in_size,
        groups,
        lambda read: unpack(read(packed), 4, in_size),
        lambda read: read(scales).float()[:, :groups],
        None if without_zeros else lambda read: unpack(read(zeros), 4, groups),
    )


def add(derived: Derived, name: str, used: Sequence[str], parts: Parts, bits: int) -> None:
    """Add an integer weight [O, I], which can be read dequantised, or as codes, scales and shifts per group."""
    size = parts.in_size // parts.groups

    def zeros(read: Read) -> Tensor:
        if parts.zeros is not None:
            return parts.zeros(read)
        return torch.full((parts.out_size, parts.groups), 1 << (bits - 1))

    def make(read: Read) -> Tensor:
        scale, zero = (each.repeat_interleave(size, dim=1) for each in (parts.scales(read), zeros(read)))
        return (parts.codes(read) - zero).float() * scale

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        scale = parts.scales(read)
        shifts = ((1 << kept_bits >> 1) - zeros(read)) * scale
        return GroupedWeight(parts.codes(read).to(torch.uint8), scale, shifts, bits=kept_bits).rows(rows)

    kept_bits = code_bits(bits)
    form = GroupForm(size, kept_bits)
    derived.add(name, (parts.out_size, parts.in_size), used, make, make_grouped, form)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 words [n, W] to [n, count], with outputs in order."""
    numbers = unpack(words, bits, count)
    return in_awq_order(numbers) if bits == 4 else numbers


def in_awq_order(numbers: Tensor) -> Tensor:
    """Reorder [n, O] from AWQ's order within words to the order of outputs."""
    return numbers.unflatten(1, (-1, 8))[:, :, POSITION].flatten(1)
