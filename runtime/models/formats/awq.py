"""AWQ: whole numbers of 2 to 8 bits in words along the outputs, groups of inputs with a scale and a zero.

    qweight int32 [I, O * bits / 32]   lowest bits first, dense; of 4 bits in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [G, O * bits / 32]   likewise
    scales  float [G, O]

weight[o, i] = scales[i / group_size, o] * (q[i, o] - zero[i / group_size, o]). Without zeros (`zero_point` false) each
is half the range. Source: AutoAWQ's "gemm" packing, GPTQModel's of other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight, GroupForm
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats.bits import unpack
from runtime.models.formats.stored import Derived, Read, Stored, require

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that stands in each four bits
PLACE = tuple(ORDER.index(output) for output in range(8))


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    bits = fields.optional_integer("bits") or fields.optional_integer("w_bit") or 4
    if not 2 <= bits <= 8:
        raise fields.wrong("bits", "from 2 to 8")
    version = str(fields.values.get("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"{fields.path}version {version} is not supported; use one packed for gemm.")
    derived = Derived()
    for name in stored.shapes:
        if name.endswith(".qweight"):
            _add(
                derived,
                stored,
                name.removesuffix(".qweight"),
                bits,
                symmetric=fields.values.get("zero_point") is False,
            )
    return derived


def _add(derived: Derived, stored: Stored, layer: str, bits: int, *, symmetric: bool) -> None:
    packed, zeros, scales = f"{layer}.qweight", f"{layer}.qzeros", f"{layer}.scales"
    without_zeros = symmetric and zeros not in stored.shapes
    require(stored, scales, *(() if without_zeros else (zeros,)))
    in_size, words = stored.shapes[packed]
    groups, out_size = stored.shapes[scales]
    if words != -(-out_size * bits // 32) or in_size % groups:
        raise CheckpointError(f"{packed} and {scales} do not fit each other.")

    def read_zeros(read: Read) -> Tensor:
        return (
            torch.full((groups, out_size), 1 << (bits - 1))
            if without_zeros
            else _unpack(read(zeros), bits, out_size)
        )

    def make(read: Read) -> Tensor:
        size = in_size // groups
        scale, zero = (
            each.repeat_interleave(size, dim=0) for each in (read(scales).float(), read_zeros(read))
        )
        return ((_unpack(read(packed), bits, out_size) - zero).float() * scale).T

    def make_grouped(read: Read, rows: slice) -> GroupedWeight:
        scale = read(scales).float().T
        codes = _unpack(read(packed), bits, out_size).T.to(torch.uint8)
        return GroupedWeight(codes, scale, (8 - read_zeros(read).T) * scale).rows(rows)

    used = [packed, scales, *(() if without_zeros else (zeros,))]
    kept = (make_grouped, GroupForm(in_size // groups)) if bits == 4 else (None, None)
    derived.add(f"{layer}.weight", (out_size, in_size), used, make, *kept)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [n, W] -> [n, count], the outputs in order."""
    numbers = unpack(words, bits, count)
    return in_awq_order(numbers) if bits == 4 else numbers


def in_awq_order(numbers: Tensor) -> Tensor:
    """[n, O] as they stand in words of eight -> in their order."""
    return numbers.unflatten(1, (-1, 8))[:, :, PLACE].flatten(1)
