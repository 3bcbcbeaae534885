"""How a layer says which checkpoint tensors its parameters are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

Axes = tuple[str | None, ...]


class Piece(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter that it fills.

    `axes` names the logical axis of each dimension ("heads", "kv_heads", "mlp", "vocab", or None for what is
    never split), so that parallelism is added from outside.
    """

    name: str  # in the checkpoint
    parameter: nn.Parameter
    first_row: int
    num_rows: int
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.parameter.shape[1:])

    @property
    def target(self) -> Tensor:
        return self.parameter.data[self.first_row : self.first_row + self.num_rows]


@runtime_checkable
class Weighted(Protocol):
    """A layer with parameters of its own; its pieces cover each of their rows exactly once."""

    def pieces(self) -> Iterator[Piece]: ...


@runtime_checkable
class Prepared(Protocol):
    """A layer whose weights its kernels may want in another layout; called once, when all weights are filled.

    What is replaced is let go, so that memory holds each weight once.
    """

    def prepare(self) -> None: ...


def whole(name: str, parameter: nn.Parameter, axes: Axes) -> Piece:
    """The piece of a parameter that is one checkpoint tensor."""
    return Piece(name, parameter, 0, parameter.shape[0], axes)
