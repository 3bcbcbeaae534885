"""MXFP4 of gpt-oss: experts in e2m1 with one exponent per 32 inputs.

    NAME_blocks uint8 [X, O, I / 32, 16]   two per byte, the lower half first
    NAME_scales uint8 [X, O, I / 32]       e8m0

The model's tensor is NAME [X, I, O], with inputs first as in unquantised checkpoints. Source: the OCP
Microscaling Formats specification 1.0, gpt-oss' reference implementation.
"""

from __future__ import annotations

from torch import Tensor

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import E2M1, look_up, nibbles, power_of_two
from runtime.loading.formats.stored import Derived, Read, Stored, require


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    derived = Derived()
    for name in stored.shapes:
        if name.endswith("_blocks"):
            _add(derived, stored, name.removesuffix("_blocks"))
    return derived


def _add(derived: Derived, stored: Stored, name: str) -> None:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    require(stored, scales)
    *outer, groups, half = stored.shapes[blocks]
    if (*outer, groups) != stored.shapes[scales] or len(outer) not in (1, 2):
        raise CheckpointError(f"{blocks} and {scales} do not match.")
    shape = (*outer[:-1], groups * half * 2, outer[-1])

    def make(read: Read) -> Tensor:
        numbers = look_up(nibbles(read(blocks)), E2M1)  # [X, O, G, 32]
        return (numbers * power_of_two(read(scales)).unsqueeze(-1)).flatten(-2).transpose(-1, -2)

    derived.add(name, shape, [blocks, scales], make)
