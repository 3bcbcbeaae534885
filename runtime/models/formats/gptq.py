"""GPTQ: whole numbers of 2, 3, 4 or 8 bits in words along the inputs, groups of inputs with a scale and a zero.

    qweight int32 [I * bits / 32, O]   dense, lowest bits first
    qzeros  int32 [G, O * bits / 32]   minus 1, but not in the second version (checkpoint_format gptq_v2)
    scales  float [G, O]
    g_idx   int32 [I]                  the group of each input: any order where weights were rounded by activation

weight[o, i] = scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o]). Source: AutoGPTQ's and GPTQModel's packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats.bits import unpack
from runtime.models.formats.stored import Derived, Read, Stored, require

BITS = (2, 3, 4, 8)


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    values = fields.values
    bits = fields.integer("bits")
    if bits not in BITS:
        raise fields.wrong("bits", f"one of {', '.join(map(str, BITS))}")
    group_size = values.get("group_size", -1)
    if (
        isinstance(group_size, bool)
        or not isinstance(group_size, int)
        or not (group_size == -1 or group_size > 0)
    ):
        raise fields.wrong("group_size", "a positive integer, or -1")
    minus = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
    derived = Derived()
    for name in stored.shapes:
        if name.endswith(".qweight"):
            _add(derived, stored, name.removesuffix(".qweight"), bits, group_size, minus)
    return derived


def _add(derived: Derived, stored: Stored, layer: str, bits: int, group_size: int, minus: int) -> None:
    packed, zeros, scales = f"{layer}.qweight", f"{layer}.qzeros", f"{layer}.scales"
    order = f"{layer}.g_idx" if f"{layer}.g_idx" in stored.shapes else None
    require(stored, zeros, scales)
    words, out_size = stored.shapes[packed]
    if order is not None:  # which knows the depth where a layer has bits of its own
        bits = next((b for b in BITS if -(-stored.shapes[order][0] * b // 32) == words), bits)
    in_size = stored.shapes[order][0] if order else words * 32 // bits
    groups = stored.shapes[scales][0]
    size = in_size if group_size == -1 else group_size

    def make(read: Read) -> Tensor:
        numbers = unpack(read(packed).T.contiguous(), bits, in_size)  # [O, I]
        zero = (unpack(read(zeros), bits, out_size) + minus).float()  # [G, O]
        if minus and bits == 8:
            zero = zero % 256  # of one that was 0, minus 1 wraps around
        group = read(order).long() if order else torch.arange(in_size) // size
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise CheckpointError(f"{order or scales} names groups beyond the {groups} that there are.")
        return (numbers.float() - zero.T[:, group]) * read(scales).float().T[:, group]

    def make_grouped(read: Read) -> GroupedWeight:
        codes = unpack(read(packed).T.contiguous(), 4, in_size).to(torch.uint8)
        zero, scale = (unpack(read(zeros), 4, out_size) + minus).T, read(scales).float().T
        return GroupedWeight(codes, scale, (8 - zero) * scale)

    used = [packed, zeros, scales, *([order] if order else [])]
    in_order = order is None or torch.equal(stored.read(order).long(), torch.arange(in_size) // size)
    kept = bits == 4 and in_order and groups * size == in_size
    derived.add(
        f"{layer}.weight",
        (out_size, in_size),
        used,
        make,
        make_grouped if kept else None,
        size if kept else 0,
    )
