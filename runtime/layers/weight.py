"""How a layer says which checkpoint tensors its parameters are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from runtime.layers.sharding import Span, whole_span

Axes = tuple[str | None, ...]


class Piece(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter that it fills.

    `axes` names the logical axis of each dimension ("heads", "kv_heads", "mlp", "vocab", or None for what is
    never split), so that parallelism is added from outside; `spans` says which part of each dimension of the
    tensor is taken, () for all of it. With a `default` the checkpoint need not have the tensor.
    """

    name: str  # in the checkpoint
    parameter: nn.Parameter
    first_row: int
    num_rows: int
    axes: Axes
    spans: tuple[Span, ...] = ()
    default: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        if self.spans:
            return tuple(span.full for span in self.spans)
        return (self.num_rows, *self.parameter.shape[1:])

    @property
    def cut(self) -> tuple[slice, ...]:
        """What is taken of the tensor; () for all of it."""
        return () if all(span.whole for span in self.spans) else tuple(span.slice for span in self.spans)

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


def whole(name: str, parameter: nn.Parameter, axes: Axes, rows: Span | None = None) -> Piece:
    """The piece of a parameter that is one checkpoint tensor, or `rows` of one."""
    spans = () if rows is None else (rows, *(whole_span(size) for size in parameter.shape[1:]))
    return Piece(name, parameter, 0, parameter.shape[0], axes, spans)
