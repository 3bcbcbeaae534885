"""GPTQ: integers of 2 to 8 bits, packed in words along the inputs; a scale and a zero per group of inputs.

    qweight int32 [I * bits / 32, O]   dense, lowest bits first; or in planes (gptq_p, and always for 5, 6 and 7 bits)
    qzeros  int32 [G, O * bits / 32]   packed like qweight; minus 1 in the first version (checkpoint_format gptq)
    scales  float [G, O]
    g_idx   int32 [I]                  group of each input, in any order if weights were ordered by activation

weight[o, i] = scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o]). The bits and groups of a layer may differ
(`dynamic`); its shapes determine them. Source: AutoGPTQ's and GPTQModel's packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight, GroupForm, code_bits
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import unpack, unpack_planes
from runtime.loading.formats.stored import Derived, Read, Stored, require

BITS = range(2, 9)


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    values = fields.values
    bits = fields.integer("bits")
    if bits not in BITS:
        raise fields.wrong("bits", "from 2 to 8")
    if _format(fields) not in ("gptq", "gptq_v2", "gptq_p"):
        raise fields.wrong("checkpoint_format", "gptq, gptq_v2 or gptq_p")
    group_size = values.get("group_size", -1)
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise fields.wrong("group_size", "a positive integer, or -1")
    derived = Derived()
    for name, dtype in stored.dtypes.items():
        if name.endswith(".qweight"):
            if dtype != torch.int32:
                raise CheckpointError(f"{name} has the dtype {dtype}. Use a checkpoint whose pack_dtype is int32.")
            _add(derived, stored, name.removesuffix(".qweight"), bits, group_size, fields)
    return derived


def _format(fields: Fields) -> str:
    return str(fields.values.get("checkpoint_format") or "gptq").lower()


def _numbers(words: Tensor, bits: int, count: int, fields: Fields) -> Tensor:
    """Unpack words along the last dimension to int32 [rows, count]."""
    planes = bits in (5, 6, 7) or (bits == 3 and _format(fields) == "gptq_p")
    return unpack_planes(words, bits, count) if planes else unpack(words, bits, count)


def _zeros(words: Tensor, bits: int, count: int, fields: Fields) -> Tensor:
    """Return the zero points [G, O].

    The first version of the format stores each zero point minus 1. Tools subtract the 1s from whole packed words, so a
    zero point of 0 borrows from the next number in the word. This function therefore adds the 1s to whole words, except
    for bit widths whose numbers span two words. For 3 bits, tools pack zero points in different ways; for symmetric
    quantisation, the function returns the zero point 4 without reading them.
    """
    if _format(fields) != "gptq":
        return _numbers(words, bits, count, fields)
    if bits == 3 and fields.values.get("sym") is True:
        return torch.full((len(words), count), 4)
    if 32 % bits:
        return (_numbers(words, bits, count, fields) + 1) & ((1 << bits) - 1)
    return unpack(words.to(torch.int64) + sum(1 << shift for shift in range(0, 32, bits)), bits, count)


def _add(derived: Derived, stored: Stored, layer: str, bits: int, group_size: int, fields: Fields) -> None:
    packed, zeros, scales = f"{layer}.qweight", f"{layer}.qzeros", f"{layer}.scales"
    order = f"{layer}.g_idx" if f"{layer}.g_idx" in stored.shapes else None
    require(stored, zeros, scales, *([f"{layer}.g_idx"] if fields.values.get("desc_act") is True else ()))
    words, out_size = stored.shapes[packed]
    groups = stored.shapes[scales][0]
    if -(-out_size * bits // 32) != stored.shapes[zeros][-1]:
        bits = next((b for b in BITS if -(-out_size * b // 32) == stored.shapes[zeros][-1]), bits)
    in_size = stored.shapes[order][0] if order else words * 32 // bits
    shapes = {zeros: (groups, -(-out_size * bits // 32)), scales: (groups, out_size)}
    if -(-in_size * bits // 32) != words or any(stored.shapes[name] != each for name, each in shapes.items()):
        raise CheckpointError(f"{packed}, {zeros} and {scales} do not match with {bits} bits.")
    size = in_size if group_size == -1 else group_size
    if -(-in_size // size) != groups:  # this layer's group size differs from the configuration's
        size = -(-in_size // groups)

    def make(read: Read) -> Tensor:
        numbers = _numbers(read(packed).T.contiguous(), bits, in_size, fields)  # [O, I]
        zero = _zeros(read(zeros), bits, out_size, fields).float()
        group = read(order).long() if order else torch.arange(in_size) // size
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise CheckpointError(f"{order or scales} refers to groups beyond the last of {groups} groups.")
        return (numbers.float() - zero.T[:, group]) * read(scales).float().T[:, group]

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        codes = _numbers(read(packed).T.contiguous(), bits, in_size, fields).to(torch.uint8)
        zero, scale = _zeros(read(zeros), bits, out_size, fields).T, read(scales).float().T
        return GroupedWeight(codes, scale, ((1 << kept_bits >> 1) - zero) * scale, bits=kept_bits).rows(rows)

    used = [packed, zeros, scales, *([order] if order else [])]
    in_order = order is None or torch.equal(stored.read(order).long(), torch.arange(in_size) // size)
    kept, kept_bits = in_order and groups * size == in_size, code_bits(bits)
    derived.add(
        f"{layer}.weight",
        (out_size, in_size),
        used,
        make,
        make_grouped if kept else None,
        GroupForm(size, kept_bits) if kept else None,
    )
