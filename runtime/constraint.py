"""What a request does to its logits with data that the host computes while the forward runs.

The seam for grammars and custom logits processors. A step's forward is enqueued first; what the sampling of a row
needs from the host (a grammar's mask needs the token before) may arrive until the forward is done. A row whose data
has not arrived by then yields no token in that step and is computed again once it has; other rows do not wait.

    scheduler: batch n+1 is filled         -> RowHostData(row, future), for the token after one still unknown
               the result of step n        -> Constraint.host_data_after(its tokens), computed on any thread
    sampler:   forward n+1 is enqueued     -> waits for the futures until the forward is done and a moment longer
               what has arrived is applied -> token; what has not: no token, and the scheduler goes back by one
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("penstock.scheduler")


class HostData(NamedTuple):
    """What one row does to its logits before its token is chosen: after penalties and biases, in this order."""

    # Changes the row's logits, a float32 tensor [V], in place; on a device it must not wait for it.
    process: Callable[[Any], None] | None = None
    # int32 [at least ceil(V / 32)]: bit i % 32, counted from the lowest, of word i // 32 is 1 where token i is allowed.
    bitmask: NDArray[np.int32] | None = None


class Constraint(Protocol):
    """Decides, token by token, what a request may generate. One constraint serves all choices of its request."""

    def host_data_after(self, choice: int, output_ids: tuple[int, ...]) -> Future[HostData]:
        """What applies to the token that follows `output_ids` of the request's choice number `choice`.

        Called on the event loop, once for each new token, so it returns at once and computes elsewhere. A future
        with an exception ends that choice with an error.
        """
        ...


class SequenceConstraint:
    """The constraint of one sequence: the host data of its next tokens, by the output length that they follow.

    Belongs to the scheduler. A future may be handed out before the tokens that it depends on are known.
    """

    __slots__ = ("_choice", "_constraint", "_futures", "_num_asked")

    def __init__(self, constraint: Constraint, choice: int) -> None:
        self._constraint = constraint
        self._choice = choice
        self._futures: dict[int, Future[HostData]] = {}
        self._num_asked = -1  # length of the output for which the constraint was asked last

    def data_after(self, num_output: int, output_ids: list[int]) -> Future[HostData]:
        """For the token behind `num_output` others, of which `output_ids` are known."""
        if num_output not in self._futures:
            self._futures[num_output] = Future()
        if num_output == len(output_ids):
            self.advance(output_ids)
        return self._futures[num_output]

    def advance(self, output_ids: list[int]) -> None:
        """These are all tokens that are known now: ask for what applies to the next one, unless that was done."""
        num_output = len(output_ids)
        if self._num_asked == num_output:
            return
        self._num_asked = num_output
        self._futures = {length: future for length, future in self._futures.items() if length >= num_output}
        future = self._futures.setdefault(num_output, Future())
        try:
            source = self._constraint.host_data_after(self._choice, tuple(output_ids))
        except Exception as error:  # foreign code: it costs its own request, not the engine
            logger.error("a constraint failed", exc_info=error)
            future.set_exception(error)
            return
        source.add_done_callback(partial(_pass_on, future))

    def release(self) -> None:
        """The sequence ended, and its tokens of steps in flight will be dropped: let these steps not wait."""
        for future in self._futures.values():
            with suppress(InvalidStateError):  # what it waited for came
                future.set_result(HostData())


def _pass_on(future: Future[HostData], source: Future[HostData]) -> None:
    error = RuntimeError("Host data was cancelled.") if source.cancelled() else source.exception()
    with suppress(InvalidStateError):  # the sequence ended meanwhile
        if error is None:
            future.set_result(source.result())
        else:
            future.set_exception(error)
            logger.error("a constraint failed", exc_info=error)
