"""What a request does to its logits with data that the host computes while the forward runs.

The seam for grammars and custom logits processors. A step's forward is enqueued first; what the sampling of a row
needs from the host (a grammar's mask needs the token before) may arrive until the forward is done. A row whose data
has not arrived by then yields no token in that step and is computed again once it has; other rows do not wait.

    scheduler: batch n+1 is filled         -> RowHostData(row, future), for the token after one still unknown
               the result of step n        -> Constraint.host_data_after(its tokens), answered by any thread
    sampler:   forward n+1 is enqueued     -> waits for the futures until the forward is done and a moment longer
               what has arrived is applied -> token; what has not: no token, and the scheduler goes back by one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
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
    # The only token that `bitmask` allows, and those behind it of which the same is known; (): there is a choice.
    forced: tuple[int, ...] = ()


def allow(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens in place, in the int32 [words] of `HostData`."""
    import numpy as np

    words, bits = _places(token_ids)
    np.bitwise_or.at(bitmask.view(np.uint32), words, bits)


def forbid(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Clear the bits of these tokens in place, in the int32 [words] of `HostData`."""
    import numpy as np

    words, bits = _places(token_ids)
    np.bitwise_and.at(bitmask.view(np.uint32), words, ~bits)


def allows(bitmask: NDArray[np.int32], token_id: int) -> bool:
    """Whether the bit of this token is set."""
    return bool(int(bitmask[token_id // 32]) >> token_id % 32 & 1)


def allowing_only(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """int32 [num_words] with the bits of these tokens alone."""
    import numpy as np

    bitmask = np.zeros(num_words, np.int32)
    allow(bitmask, token_ids)
    return bitmask


def allowing_all_but(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """int32 [num_words] with all bits but those of these tokens."""
    import numpy as np

    bitmask = np.full(num_words, -1, np.int32)
    forbid(bitmask, token_ids)
    return bitmask


def _places(token_ids: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """The words that the bits of these tokens are in, and words with only those bits."""
    import numpy as np

    ids = np.fromiter(token_ids, np.int64)
    return ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


class Output(NamedTuple):
    """The tokens of a choice that were known when its next one was asked for."""

    ids: list[int]  # the prompt, the output, and what came behind it meanwhile
    num_prompt: int
    num_before: int  # output tokens at the call before; 0: the output begins, perhaps anew
    num_output: int

    @property
    def new_ids(self) -> list[int]:
        """What came since the call before."""
        return self.ids[self.num_prompt + self.num_before : self.num_prompt + self.num_output]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """All of it, which takes time where it is long."""
        return tuple(self.ids[self.num_prompt : self.num_prompt + self.num_output])


class Constraint(Protocol):
    """Decides, token by token, what a request may generate. One constraint serves all choices of its request."""

    def host_data_after(self, choice: int, output: Output, answer: Future[HostData]) -> None:
        """Set `answer` to what applies to the token behind this output of the choice, by `give` or `refuse`.

        Called on the event loop, once for each step that a choice goes on, so it returns at once and computes
        elsewhere. What is refused, or raised here, ends that choice with an error.
        """
        ...


def give(answer: Future[HostData], data: HostData) -> None:
    """What applies to a token, unless nobody waits for it any more."""
    with suppress(InvalidStateError):
        answer.set_result(data)


def refuse(answer: Future[HostData], error: BaseException) -> None:
    """Something broke, or nothing is left to choose: ends that choice with an error."""
    with suppress(InvalidStateError):
        answer.set_exception(error)


class SequenceConstraint:
    """The constraint of one sequence: the host data of its next tokens, by the output length that they follow.

    Belongs to the scheduler. A future may be handed out before the tokens that it depends on are known.
    """

    __slots__ = ("_choice", "_constraint", "_forced", "_futures", "_num_told")

    def __init__(self, constraint: Constraint, choice: int) -> None:
        self._constraint = constraint
        self._choice = choice
        self._futures: dict[int, Future[HostData]] = {}
        self._forced: tuple[int, tuple[int, ...]] = (0, ())  # output length, and what was forced behind it
        self._num_told = -1  # length of the output for which the constraint was asked last

    def data_after(self, num_output: int, ids: list[int], num_prompt: int) -> Future[HostData]:
        """For the token behind `num_output` others; `ids` are the prompt and those that are known."""
        future = self._futures.get(num_output)
        if future is None:
            future = self._futures[num_output] = Future()
        if num_prompt + num_output == len(ids):
            self.advance(ids, num_prompt)
        return future

    def forced_after(self, num_output: int) -> tuple[int, ...]:
        """The tokens behind `num_output` others about which nothing is left to choose, as far as that is known."""
        future = self._futures.get(num_output)
        if future is None or not future.done():
            start, forced = self._forced
            return forced[num_output - start :]
        try:  # without asking what it holds: each question to a future takes a lock, and there is a future a row
            data = future.result()
        except (Exception, CancelledError):  # who set it has said why
            return ()
        return data.forced if data.process is None else ()

    def advance(self, ids: list[int], num_prompt: int) -> None:
        """These are all tokens that are known now: ask for what applies to the next one, unless that was done."""
        num_output, num_before = len(ids) - num_prompt, max(self._num_told, 0)
        if self._num_told == num_output:
            return
        if forced := self.forced_after(self._num_told):
            self._forced = self._num_told, forced
        self._num_told = num_output
        for length in [length for length in self._futures if length < num_output]:
            del self._futures[length]
        answer = self._futures.get(num_output)
        if answer is None:
            answer = self._futures[num_output] = Future()
        try:
            output = Output(ids, num_prompt, num_before, num_output)
            self._constraint.host_data_after(self._choice, output, answer)
        except Exception as error:  # foreign code: it costs its own request, not the engine
            logger.error("a constraint failed", exc_info=error)
            refuse(answer, error)

    def release(self) -> None:
        """The sequence ended, and its tokens of steps in flight will be dropped: let these steps not wait."""
        for future in self._futures.values():
            give(future, HostData())


class AllowedTokens:
    """A `Constraint` that allows the same token ids, all below `vocab_size`, at every position of an output."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self._data = HostData(bitmask=allowing_only(token_ids, -(-vocab_size // 32)))

    def host_data_after(self, choice: int, output: Output, answer: Future[HostData]) -> None:
        """The mask, which is there already."""
        give(answer, self._data)
