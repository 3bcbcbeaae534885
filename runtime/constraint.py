"""Constraints on the tokens of a request, with data that the host computes while the forward runs.

Grammars and custom logits processors use this interface. A step's forward is enqueued first. The data that sampling
needs from the host (a grammar's mask depends on the previous token) may arrive until the forward is done. A row whose
data is late yields no token in that step and is computed again once the data is there. Other rows do not wait.

    scheduler: fills batch n+1             -> an empty HostData per row, for the token after a still unknown one
               gets the result of step n   -> Constraint.host_data_after(its tokens); any thread fills the data
    sampler:   enqueued forward n+1        -> waits for the data until the forward is done, and a moment longer
               applies the data            -> a token; without data: no token, and the scheduler rewinds by one

A row with drafts needs data after each draft too (`DraftData`). It is computed when both the output before the row and
the drafts are known, and is dropped with the row: the constraint advances only by tokens of the output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("penstock.scheduler")

FEW_ROWS = 4  # up to this many masks are searched faster as Python integers than as arrays


# The message of `Finish` if an output ends because of its constraint.
NOTHING_ALLOWED = "The output cannot go on: the constraint of this request allows no token, or exceeds a limit."


class HostData:
    """Changes to one row's logits before its token is chosen: `biases`, then `process`, then `bitmask`.

    It starts empty, and any thread fills it once. It needs no lock: the fields are written before `is_there`, in the
    order that the GIL preserves, and are valid only after it is set.
    """

    is_there = False
    failed = False  # the constraint failed or allows no token; the choice ends with an error
    skipped = False  # after a draft: no token is chosen with this data
    # Changes the row's logits (float32 [V]) in place; it must not wait for a device. May be set before `is_there`.
    process: Callable[[Any], None] | None = None
    # (int64 [n], float32 [n]): token ids, and what is added to their logits. Set before `is_there`.
    biases: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    # int32 [at least ceil(V / 32)]: bit i % 32 (from the lowest) of word i // 32 is 1 if token i is
    # allowed. None: all tokens are allowed.
    bitmask: NDArray[np.int32] | None = None
    # The only token that `bitmask` allows, and the forced tokens after it; (): several tokens are allowed.
    # Set before the other fields if an earlier token already determined it.
    forced: tuple[int, ...] = ()

    # Each row of each step creates an object, so fields are class attributes until they are set.
    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def give(
        self,
        bitmask: NDArray[np.int32] | None = None,
        forced: tuple[int, ...] = (),
        process: Callable[[Any], None] | None = None,
    ) -> None:
        """Set the data, unless it is set already. With a logits processor no token is forced."""
        if not self.is_there:
            self.bitmask, self.process = bitmask, process or self.process
            self.forced = forced if self.process is None else ()
            self._tell()

    def fail(self) -> None:
        """End the choice with an error. The caller logs the reason."""
        if not self.is_there:
            self.failed, self.forced = True, ()
            self._tell()

    def skip(self) -> None:
        """Let no token be chosen with this data. Only for data after drafts."""
        if not self.is_there:
            self.skipped = True
            self._tell()

    def when_there(self, call: Callable[[], object]) -> None:
        """Call `call`, on any thread, when the data is there. `call` may be called twice."""
        self._calls.append(call)
        if self.is_there:
            call()

    def _tell(self) -> None:
        self.is_there = True
        for call in self._calls:
            call()


class DraftData:
    """The host data of the tokens after each draft of a row, computed as if the drafts before it were accepted.

    Drafts are accepted only as far as their data has arrived, so late data costs drafts and no token. The ids are set
    once, by the scheduler or on the device thread.
    """

    def __init__(self, count: int) -> None:
        self.after = tuple(HostData() for _ in range(count))  # [i]: data of the token after draft i
        self.ids: tuple[int, ...] | None = None  # None: not proposed yet
        self._calls: list[Callable[[], object]] = []
        self._lock = Lock()

    def propose(self, ids: Iterable[int]) -> None:
        """Set the ids of the drafts, on any thread."""
        with self._lock:
            self.ids = tuple(ids)
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def when_proposed(self, call: Callable[[], object]) -> None:
        """Call `call` once, on any thread, when the ids are set."""
        with self._lock:
            if self.ids is None:
                self._calls.append(call)
                return
        call()

    def skip_from(self, index: int) -> None:
        """Let the row end before the token after draft `index`, unless an earlier draft is rejected."""
        for data in self.after[index:]:
            data.skip()

    def release(self) -> None:
        """Fill all open data without masks, so that no step waits for it."""
        for data in self.after:
            data.give()


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
    """Return the rows of bitmasks [n, words] that allow a token with these `places_of`."""
    words, bits = places
    rows, _ = (bitmasks.view(bits.dtype)[:, words] & bits).nonzero()
    return set(rows.tolist())


def only_tokens(bitmasks: NDArray[np.int32]) -> dict[int, int]:
    """Map each row of bitmasks [n, words] that allows a single token to this token."""
    import numpy as np

    found: dict[int, int] = {}
    if len(bitmasks) <= FEW_ROWS:
        for row, bitmask in enumerate(bitmasks):
            bits = int.from_bytes(bitmask.tobytes(), "little")
            if bits and bits & (bits - 1) == 0:
                found[row] = bits.bit_length() - 1
        return found
    together = np.bitwise_or.reduce(bitmasks.view(np.uint32), axis=1)
    for row in np.flatnonzero(together & (together - 1) == 0).tolist():  # other rows have at least two bits
        words = np.flatnonzero(bitmasks[row])
        if len(words) == 1:
            found[row] = 32 * int(words[0]) + int(together[row]).bit_length() - 1
    return found


def allowing_only(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """Return int32 [num_words] with only the bits of these tokens."""
    import numpy as np

    bitmask = np.zeros(num_words, np.int32)
    allow(bitmask, token_ids)
    return bitmask


def allowing_all_but(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """Return int32 [num_words] with all bits except those of these tokens."""
    import numpy as np

    bitmask = np.full(num_words, -1, np.int32)
    forbid(bitmask, token_ids)
    return bitmask


def places_of(token_ids: Iterable[int]) -> Places:
    """Return for each token the index of the word with its bit, and a word in which only this bit is set."""
    import numpy as np

    ids = np.fromiter(token_ids, np.int64)
    return ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


Places: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.uint32]]"


class Output(NamedTuple):
    """The known tokens of a choice. A constraint gets them to compute the data for the next token."""

    ids: list[int]  # prompt and output; the list grows when later tokens arrive
    num_prompt: int
    num_before: int  # output tokens at the previous call; 0 at the first call and after a restart
    num_output: int
    # Whether forced tokens will be appended; if not, the constraint need not find them.
    wants_forced: bool = True

    @property
    def new_ids(self) -> list[int]:
        """Output tokens since the previous call."""
        return self.ids[self.num_prompt + self.num_before : self.num_prompt + self.num_output]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """All output tokens; copies the list."""
        return tuple(self.ids[self.num_prompt : self.num_prompt + self.num_output])


class Constraint(Protocol):
    """Decides, token by token, what a request may generate. One constraint serves all choices of its request."""

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Fill `data` for the token after this output of the choice.

        The event loop calls it once per step of the choice, so it must return at once and compute elsewhere. A failure
        or an exception ends the choice with an error.
        """
        ...


@runtime_checkable
class DraftedConstraint(Constraint, Protocol):
    """A constraint that also computes the data of tokens after drafts. Outputs of other constraints have no drafts."""

    @property
    def takes_drafts(self) -> bool:
        """Whether outputs may have drafts; constraints around others ask them."""
        ...

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Fill `drafts` for a row that continues this output of the choice with drafts.

        The event loop calls it after `host_data_after` with the same output, whose data is `first`. The ids of the
        drafts may be set later. The data after a draft that its mask forbids is not read, and may be skipped.
        """
        ...


class SequenceConstraint:
    """The constraint of one sequence, with the host data of its next tokens.

    The scheduler owns it. It may hand out host data before the tokens that the data depends on are known.
    """

    __slots__ = ("_choice", "_constraint", "_drafts", "_later", "_num_told", "next")

    def __init__(self, constraint: Constraint, choice: int) -> None:
        self._constraint = constraint
        self._choice = choice
        self._num_told = -1  # output length at the last call of the constraint; -1 before the first
        self.next = HostData()  # data for the token after the output of the last call
        # Data for tokens after longer outputs, not all of whose tokens are known.
        self._later: dict[int, HostData] = {}
        # The newest drafts, and the output length before them.
        self._drafts: tuple[int, DraftData] | None = None

    @property
    def takes_drafts(self) -> bool:
        """Whether rows of the sequence may have drafts."""
        return isinstance(self._constraint, DraftedConstraint) and self._constraint.takes_drafts

    def data_after(self, num_output: int, ids: list[int], num_prompt: int) -> HostData:
        """Return the host data for the token after `num_output` output tokens.

        `ids` are the prompt and the known output.
        """
        if num_prompt + num_output == len(ids):
            self.advance(ids, num_prompt)
        if num_output == self._num_told:
            return self.next
        data = self._later.get(num_output)
        if data is None:
            data = self._later[num_output] = HostData()
        return data

    def drafts_after(self, num_output: int, ids: list[int], num_prompt: int, count: int) -> DraftData:
        """Return the data for a row with `count` drafts after `num_output` output tokens.

        A sequence has at most one such row in flight. Not all of the output need be known.
        """
        drafts = DraftData(count)
        self.data_after(num_output, ids, num_prompt)
        self._drafts = num_output, drafts
        if num_output == self._num_told:
            self._begin_drafts(Output(ids, num_prompt, num_output, num_output))
        return drafts

    def _begin_drafts(self, output: Output) -> None:
        """Ask the constraint for the data of the drafts that follow this output, if there are such drafts."""
        if self._drafts is None or self._drafts[0] != output.num_output:
            return
        drafts = self._drafts[1]
        try:
            if isinstance(self._constraint, DraftedConstraint):
                self._constraint.draft_data_after(self._choice, output, self.next, drafts)
        except Exception as error:
            logger.error("a constraint failed", exc_info=error)
            drafts.skip_from(0)

    def forced_after(self, num_output: int) -> tuple[int, ...]:
        """Return the known forced tokens after `num_output` output tokens."""
        return self.next.forced[num_output - self._num_told :]

    def force(self, num_output: int, ids: tuple[int, ...]) -> None:
        """Set the forced tokens after `num_output` output tokens. Replays set the tokens of a record."""
        self.next.forced = (0,) * (num_output - self._num_told) + ids

    def advance(self, ids: list[int], num_prompt: int, wants_forced: bool = True) -> None:
        """Ask the constraint for the data of the token after `ids` (prompt and known output), unless already asked.

        `wants_forced` tells the constraint whether forced tokens will be appended.
        """
        num_output, num_before = len(ids) - num_prompt, max(self._num_told, 0)
        if self._num_told == num_output:
            return
        data = self._later.pop(num_output, None) or HostData()
        if self._later:  # forced tokens were appended meanwhile
            self._later = {length: each for length, each in self._later.items() if length > num_output}
        if self.next.forced:
            data.forced = self.forced_after(num_output)
        self._num_told, self.next = num_output, data
        try:
            output = Output(ids, num_prompt, num_before, num_output, wants_forced)
            self._constraint.host_data_after(self._choice, output, data)
        except Exception as error:  # user code: a failure ends its own request only
            logger.error("a constraint failed", exc_info=error)
            data.fail()
        self._begin_drafts(Output(ids, num_prompt, num_output, num_output))

    def release(self) -> None:
        """Fill all open host data without a mask, so that no step waits for it. Called when the sequence has ended."""
        for data in (self.next, *self._later.values()):
            data.give()
        if self._drafts is not None:
            self._drafts[1].release()


class AllowedTokens:
    """A `Constraint` that allows the same token ids, all below `vocab_size`, at every position of an output."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self._bitmask = allowing_only(token_ids, -(-vocab_size // 32))

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Set the constant mask."""
        data.give(self._bitmask)

    @property
    def takes_drafts(self) -> bool:
        """True: the mask is known for every token."""
        return True

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Set the constant mask after each draft."""
        for data in drafts.after:
            data.give(self._bitmask)


class LogitsHook:
    """A `Constraint` that calls a function of the user with each row's logits, after the inner constraint's data.

    The function gets the ids of prompt and output, and the logits (float32 [V], on the device). It changes them in
    place, or returns others. It runs on the device thread between forward and sampling, so the step waits for it. If it
    raises, its request ends with an error.
    """

    def __init__(self, function: Callable[[list[int], Any], Any], inner: Constraint | None) -> None:
        self._function = function
        self._inner = inner

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Set the process of the next token, and request the inner constraint's data."""
        ids = output.ids[: output.num_prompt + output.num_output]

        def process(logits: Any) -> None:
            changed = self._function(ids, logits)
            if changed is not None:
                logits.copy_(changed)

        data.process = process
        if self._inner is None:
            data.give()
        else:
            self._inner.host_data_after(choice, output, data)
