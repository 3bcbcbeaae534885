"""What a request does to its logits with data that the host computes while the forward runs.

The seam for grammars and custom logits processors. A step's forward is enqueued first; what the sampling of a row
needs from the host (a grammar's mask needs the token before) may arrive until the forward is done. A row whose data
has not arrived by then yields no token in that step and is computed again once it has; other rows do not wait.

    scheduler: batch n+1 is filled         -> an empty HostData for each row, for the token after one still unknown
               the result of step n        -> Constraint.host_data_after(its tokens), which any thread fills
    sampler:   forward n+1 is enqueued     -> waits for them until the forward is done and a moment longer
               what has arrived is applied -> token; what has not: no token, and the scheduler goes back by one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("penstock.scheduler")

FEW_ROWS = 4  # whose bits are looked through sooner as numbers of Python's than as arrays


class HostData:
    """What one row does to its logits before its token is chosen: after penalties and biases, in this order.

    Made empty, and filled once by any thread. It has no lock: the fields are written before `is_there`, in the order
    that Python's own lock keeps, and mean nothing before it.
    """

    is_there = False
    failed = False  # something broke, or nothing is left to choose: ends the choice with an error
    # Changes the row's logits, a float32 tensor [V], in place; on a device it must not wait for it.
    process: Callable[[Any], None] | None = None
    # int32 [at least ceil(V / 32)]: bit i % 32, counted from the lowest, of word i // 32 is 1 where token i is
    # allowed. None: all are.
    bitmask: NDArray[np.int32] | None = None
    # The only token that `bitmask` allows, and those behind it of which the same is known; (): there is a choice.
    # Known before the rest where it is a part of what was known to be forced.
    forced: tuple[int, ...] = ()

    def __init__(self) -> None:  # of every row of a step: what is not set costs nothing
        self._calls: list[Callable[[], object]] = []

    def give(
        self,
        bitmask: NDArray[np.int32] | None = None,
        forced: tuple[int, ...] = (),
        process: Callable[[Any], None] | None = None,
    ) -> None:
        """Say what applies, unless that was done. Where logits are processed, nothing is forced."""
        if not self.is_there:
            self.bitmask, self.process = bitmask, process
            self.forced = forced if process is None else ()
            self._tell()

    def fail(self) -> None:
        """End the choice with an error. Whoever calls it says why, in the log."""
        if not self.is_there:
            self.failed, self.forced = True, ()
            self._tell()

    def when_there(self, call: Callable[[], object]) -> None:
        """Call this, once or twice, on any thread, as soon as the data is there."""
        self._calls.append(call)
        if self.is_there:
            call()

    def _tell(self) -> None:
        self.is_there = True
        for call in self._calls:
            call()


def allow(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens in place, in the int32 [words] of `HostData`."""
    import numpy as np

    words, bits = places_of(token_ids)
    np.bitwise_or.at(bitmask.view(np.uint32), words, bits)


def forbid(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Clear the bits of these tokens in place, in the int32 [words] of `HostData`."""
    import numpy as np

    words, bits = places_of(token_ids)
    np.bitwise_and.at(bitmask.view(np.uint32), words, ~bits)


def allows(bitmask: NDArray[np.int32], token_id: int) -> bool:
    """Whether the bit of this token is set."""
    return bool(int(bitmask[token_id // 32]) >> token_id % 32 & 1)


def rows_that_allow(bitmasks: NDArray[np.int32], places: Places) -> set[int]:
    """Of bitmasks [n, words] those that allow one of the tokens that have these `places_of`."""
    words, bits = places
    rows, _ = (bitmasks.view(bits.dtype)[:, words] & bits).nonzero()
    return set(rows.tolist())


def only_tokens(bitmasks: NDArray[np.int32]) -> dict[int, int]:
    """By row, of bitmasks [n, words] that allow a single token: that token."""
    import numpy as np

    found: dict[int, int] = {}
    if len(bitmasks) <= FEW_ROWS:
        for row, bitmask in enumerate(bitmasks):
            bits = int.from_bytes(bitmask.tobytes(), "little")
            if bits and bits & (bits - 1) == 0:
                found[row] = bits.bit_length() - 1
        return found
    together = np.bitwise_or.reduce(bitmasks.view(np.uint32), axis=1)
    for row in np.flatnonzero(together & (together - 1) == 0).tolist():  # the others have two bits at least
        words = np.flatnonzero(bitmasks[row])
        if len(words) == 1:
            found[row] = 32 * int(words[0]) + int(together[row]).bit_length() - 1
    return found


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


def places_of(token_ids: Iterable[int]) -> Places:
    """The words that the bits of these tokens are in, and words with only those bits."""
    import numpy as np

    ids = np.fromiter(token_ids, np.int64)
    return ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


Places: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.uint32]]"


class Output(NamedTuple):
    """The tokens of a choice that were known when its next one was asked for."""

    ids: list[int]  # the prompt, the output, and what came behind it meanwhile
    num_prompt: int
    num_before: int  # output tokens at the call before; 0: the output begins, perhaps anew
    num_output: int
    # Whether tokens that are known to be forced will be appended; else none need be found.
    wants_forced: bool = True

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

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Fill `data` with what applies to the token behind this output of the choice.

        Called on the event loop, once for each step that a choice goes on, so it returns at once and computes
        elsewhere. What fails, or raises here, ends that choice with an error.
        """
        ...


class SequenceConstraint:
    """The constraint of one sequence, and the host data of its next tokens.

    Belongs to the scheduler. Host data may be handed out before the tokens that it depends on are known.
    """

    __slots__ = ("_choice", "_constraint", "_later", "_num_told", "next")

    def __init__(self, constraint: Constraint, choice: int) -> None:
        self._constraint = constraint
        self._choice = choice
        self._num_told = -1  # length of the output for which the constraint was asked last
        self.next = HostData()  # of the token behind that output
        # Of tokens behind longer outputs, of which not all tokens are known.
        self._later: dict[int, HostData] = {}

    def data_after(self, num_output: int, ids: list[int], num_prompt: int) -> HostData:
        """For the token behind `num_output` others; `ids` are the prompt and those that are known."""
        if num_prompt + num_output == len(ids):
            self.advance(ids, num_prompt)
        if num_output == self._num_told:
            return self.next
        data = self._later.get(num_output)
        if data is None:
            data = self._later[num_output] = HostData()
        return data

    def forced_after(self, num_output: int) -> tuple[int, ...]:
        """The tokens behind `num_output` others about which nothing is left to choose, as far as that is known."""
        return self.next.forced[num_output - self._num_told :]

    def advance(self, ids: list[int], num_prompt: int, wants_forced: bool = True) -> None:
        """These are all tokens that are known now: ask for what applies to the next one, unless that was done.

        `wants_forced` as in `Output`.
        """
        num_output, num_before = len(ids) - num_prompt, max(self._num_told, 0)
        if self._num_told == num_output:
            return
        data = self._later.pop(num_output, None) or HostData()
        if self._later:  # forced tokens were appended
            self._later = {length: each for length, each in self._later.items() if length > num_output}
        if self.next.forced:
            data.forced = self.forced_after(num_output)
        self._num_told, self.next = num_output, data
        try:
            output = Output(ids, num_prompt, num_before, num_output, wants_forced)
            self._constraint.host_data_after(self._choice, output, data)
        except Exception as error:  # foreign code: it costs its own request, not the engine
            logger.error("a constraint failed", exc_info=error)
            data.fail()

    def release(self) -> None:
        """The sequence ended, and its tokens of steps in flight will be dropped: let these steps not wait."""
        for data in (self.next, *self._later.values()):
            data.give()


class AllowedTokens:
    """A `Constraint` that allows the same token ids, all below `vocab_size`, at every position of an output."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self._bitmask = allowing_only(token_ids, -(-vocab_size // 32))

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """The mask, which is there already."""
        data.give(self._bitmask)
