"""Weights in the layout of a library's kernels: several tensors in one block of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

ALIGNMENT = 256  # alignment of each part in memory, in bytes


class FusedWeight(Tensor):
    """A weight [O, I], or [X, O, I] of all experts. The tensor has strides of 0; the data is in `parts`.

    The shape is that of the checkpoint's weight. Parts may be padded.
    """

    parts: tuple[Tensor, ...]

    def detach(self) -> Self:
        """Return a detached tensor with the same parts. `Parameter` calls this method."""
        return _view(self.shape, self.parts)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the weight's memory."""
        return self.untyped_storage().nbytes()


def fuse(shape: Sequence[int], parts: Sequence[Tensor]) -> Any:
    """Return a weight of this shape. Its parts are copied into one block of memory, which updates can overwrite."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    memory, first, views = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device), 0, []
    for part, size in zip(parts, sizes, strict=True):
        views.append(memory[first : first + part.nbytes].view(part.dtype).view(part.shape).copy_(part))
        first += size
    return _view(shape, tuple(views))


def _view(shape: Sequence[int], parts: tuple[Tensor, ...]) -> Any:
    weight = parts[0].view(torch.uint8).as_strided(tuple(shape), (0,) * len(shape)).as_subclass(FusedWeight)
    weight.parts = parts
    return weight
