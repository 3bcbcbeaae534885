"""AWQ: whole numbers of 4 bits in words along the outputs, groups of inputs with a scale and a zero.

    qweight int32 [I, O / 8]   eight outputs in a word, lowest bits first: 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [G, O / 8]   likewise
    scales  float [G, O]

weight[o, i] = scales[i / group_size, o] * (q[i, o] - zero[i / group_size, o]). Source: AutoAWQ's "gemm" packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats.bits import unpack
from runtime.models.formats.stored import Derived, Read, Stored, require

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that stands in each four bits
PLACE = tuple(ORDER.index(output) for output in range(8))


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    bits = fields.optional_integer("bits") or fields.optional_integer("w_bit") or 4
    if bits != 4:
        raise fields.wrong("bits", "4")
    version = str(fields.values.get("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"{fields.path}version {version} is not supported; use one packed for gemm.")
    derived = Derived()
    for name in stored.shapes:
        if name.endswith(".qweight"):
            _add(derived, stored, name.removesuffix(".qweight"))
    return derived


def _add(derived: Derived, stored: Stored, layer: str) -> None:
    packed, zeros, scales = f"{layer}.qweight", f"{layer}.qzeros", f"{layer}.scales"
    require(stored, zeros, scales)
    in_size, words = stored.shapes[packed]
    groups, out_size = stored.shapes[scales]
    if words * 8 != out_size or in_size % groups:
        raise CheckpointError(f"{packed} and {scales} do not fit each other.")

    def make(read: Read) -> Tensor:
        size = in_size // groups
        scale = read(scales).float()
        wide = torch.stack([_unpack(read(packed)), _unpack(read(zeros)).repeat_interleave(size, dim=0)])
        return ((wide[0] - wide[1]).float() * scale.repeat_interleave(size, dim=0)).T

    def make_grouped(read: Read) -> GroupedWeight:
        scale = read(scales).float().T
        codes = _unpack(read(packed)).T.to(torch.uint8)
        return GroupedWeight(codes, scale, (8 - _unpack(read(zeros)).T) * scale)

    used = [packed, zeros, scales]
    derived.add(f"{layer}.weight", (out_size, in_size), used, make, make_grouped, in_size // groups)


def _unpack(words: Tensor) -> Tensor:
    """int32 [n, O / 8] -> [n, O], the outputs in order."""
    count = words.shape[1] * 8
    return unpack(words, 4, count).unflatten(1, (-1, 8))[:, :, PLACE].flatten(1)
