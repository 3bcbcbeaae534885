"""Constraints on the tokens of a request, with data that the host computes during the forward pass.

Grammars and custom logits processors use this interface. Sampling needs data from the host: for example, the mask of a
grammar, which depends on the previous token. This data may still arrive while the forward pass runs. A row whose data
is late yields no token in this step, and is computed again after the data has arrived. Other rows do not wait for it.

    scheduler: fills batch n+1             -> an empty HostData per row, for the token after the unknown one
               gets the result of step n   -> Constraint.host_data_after(its tokens); any thread fills the data
    sampler:   enqueued forward n+1        -> waits for the data until shortly after the forward pass
               applies the data            -> a token; without data: no token, and the scheduler rewinds by one

A row with draft tokens also needs data for the position after each draft token (`DraftData`). This data is computed
when the output before the row and the draft tokens are known. It is used only for this row, because the state of the
constraint advances only by output tokens.
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

FEW_ROWS = 4  # up to this number of masks, Python integers are faster than NumPy arrays


# Message in the `Finish` of an output that its constraint ended.
NOTHING_ALLOWED = "The output cannot go on: the constraint of this request allows no token, or exceeds a limit."


class HostData:
    """Changes to one row's logits before its token is chosen: `biases`, then `process`, then `bitmask`.

    The object starts empty, and any thread may fill it once. The fields are valid only if `is_there` is set. `is_there`
    is written last, and the GIL preserves the order of writes, so no lock is needed.
    """

    is_there = False
    failed = False  # the constraint failed or allows no token, so the choice ends with an error
    skipped = False  # no token is sampled with this data; set only for positions after a draft token
    # Changes the row's logits (float32 [V]) in place. Must not wait for the device. May be set before `is_there`.
    process: Callable[[Any], None] | None = None
    # (token ids int64 [n], values float32 [n]) to add to the logits. Set before `is_there`.
    biases: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    # int32 [at least ceil(V / 32)]: token i is allowed if bit i % 32 (from the lowest) of word i // 32 is 1. None: all
    # tokens are allowed.
    bitmask: NDArray[np.int32] | None = None
    # The only token that `bitmask` allows, followed by the tokens that the grammar then forces. (): several tokens are
    # allowed. May be set before the other fields, if earlier tokens already determine it.
    forced: tuple[int, ...] = ()

    # Each row of each step creates an object, so the fields are class attributes until they are set.
    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def give(
        self,
        bitmask: NDArray[np.int32] | None = None,
        forced: tuple[int, ...] = (),
        process: Callable[[Any], None] | None = None,
    ) -> None:
        """Set the data, unless it is already set. With a logits processor, `forced` is ignored."""
        if not self.is_there:
            self.bitmask, self.process = bitmask, process or self.process
            self.forced = forced if self.process is None else ()
            self._tell()

    def process_with(self, function: Callable[[Any], None]) -> None:
        """Make `process` also call `function`, after the functions that were added before.

        Call this before the data is set.
        """
        earlier = self.process
        if earlier is None:
            self.process = function
            return

        def both(logits: Any) -> None:
            earlier(logits)
            function(logits)

        self.process = both

    def fail(self) -> None:
        """Mark the constraint as failed, so that the choice ends with an error. The caller logs the reason."""
        if not self.is_there:
            self.failed, self.forced = True, ()
            self._tell()

    def skip(self) -> None:
        """Mark the data as skipped, so that no token is sampled with it. Only for data after draft tokens."""
        if not self.is_there:
            self.skipped = True
            self._tell()

    def when_there(self, call: Callable[[], object]) -> None:
        """Call `call`, on any thread, when the data has been set. `call` may be called twice."""
        self._calls.append(call)
        if self.is_there:
            call()

    def _tell(self) -> None:
        self.is_there = True
        for call in self._calls:
            call()


class DraftData:
    """The host data after each draft token of a row, computed as if all earlier draft tokens were accepted.

    If data is late, the draft tokens before it can still be accepted, so the row yields fewer tokens but at least one.
    The ids are set once, by the scheduler or on the device thread.
    """

    def __init__(self, count: int) -> None:
        self.after = tuple(HostData() for _ in range(count))  # [i]: data for the token that follows draft token i
        self.ids: tuple[int, ...] | None = None  # None: not proposed yet
        self._calls: list[Callable[[], object]] = []
        self._lock = Lock()

    def propose(self, ids: Iterable[int]) -> None:
        """Set the ids of the draft tokens. May be called on any thread."""
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
        """Let the row yield no token after draft token `index` or any later draft token."""
        for data in self.after[index:]:
            data.skip()

    def release(self) -> None:
        """Set all missing data without masks, so that no step waits for it."""
        for data in self.after:
            data.give()


def allow(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens in a bitmask, int32 [words], as in `HostData`. Changes it in place."""
    import numpy as np

    words, bits = places_of(token_ids)
    np.bitwise_or.at(bitmask.view(np.uint32), words, bits)


def forbid(bitmask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Clear the bits of these tokens in a bitmask, int32 [words], as in `HostData`. Changes it in place."""
    import numpy as np

    words, bits = places_of(token_ids)
    np.bitwise_and.at(bitmask.view(np.uint32), words, ~bits)


def allows(bitmask: NDArray[np.int32], token_id: int) -> bool:
    """Return whether the bitmask allows this token."""
    return bool(int(bitmask[token_id // 32]) >> token_id % 32 & 1)


def rows_that_allow(bitmasks: NDArray[np.int32], places: Places) -> set[int]:
    """Return the rows of the bitmasks [n, words] that allow at least one of some tokens.

    `places` is the result of `places_of` for these tokens.
    """
    words, bits = places
    rows, _ = (bitmasks.view(bits.dtype)[:, words] & bits).nonzero()
    return set(rows.tolist())


def only_tokens(bitmasks: NDArray[np.int32]) -> dict[int, int]:
    """Return {row: allowed token} for the rows of the bitmasks [n, words] that allow exactly one token."""
    import numpy as np

    found: dict[int, int] = {}
    if len(bitmasks) <= FEW_ROWS:
        for row, bitmask in enumerate(bitmasks):
            bits = int.from_bytes(bitmask.tobytes(), "little")
            if bits and bits & (bits - 1) == 0:
                found[row] = bits.bit_length() - 1
        return found
    together = np.bitwise_or.reduce(bitmasks.view(np.uint32), axis=1)
    # Rows of words with one bit in total; all others allow at least two tokens.
    for row in np.flatnonzero(together & (together - 1) == 0).tolist():
        words = np.flatnonzero(bitmasks[row])
        if len(words) == 1:
            found[row] = 32 * int(words[0]) + int(together[row]).bit_length() - 1
    return found


def allowing_only(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """Return a bitmask, int32 [num_words], that allows only these tokens."""
    import numpy as np

    bitmask = np.zeros(num_words, np.int32)
    allow(bitmask, token_ids)
    return bitmask


def allowing_all_but(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """Return a bitmask, int32 [num_words], that allows all tokens except these."""
    import numpy as np

    bitmask = np.full(num_words, -1, np.int32)
    forbid(bitmask, token_ids)
    return bitmask


def places_of(token_ids: Iterable[int]) -> Places:
    """Return, for each token, the index of its word in a bitmask, and a word with only its bit."""
    import numpy as np

    ids = np.fromiter(token_ids, np.int64)
    return ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


Places: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.uint32]]"


class Output(NamedTuple):
    """The known tokens of a choice, from which a constraint computes the data for the next token."""

    ids: list[int]  # prompt and output; the list grows while later tokens arrive
    num_prompt: int
    num_before: int  # number of output tokens at the previous call; 0 at the first call and after a restart
    num_output: int
    # Whether the scheduler appends forced tokens. If not, the constraint need not compute them.
    wants_forced: bool = True

    @property
    def new_ids(self) -> list[int]:
        """Output tokens since the previous call."""
        return self.ids[self.num_prompt + self.num_before : self.num_prompt + self.num_output]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """All output tokens, as a copy."""
        return tuple(self.ids[self.num_prompt : self.num_prompt + self.num_output])


class Constraint(Protocol):
    """Decides which tokens a request may generate. One constraint serves all choices of its request."""

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Fill `data` for the token after this output of the choice.

        Called on the event loop, once per step of the choice. It must return immediately and compute on a thread. A
        failure or an exception ends the choice with an error.
        """
        ...


@runtime_checkable
class DraftedConstraint(Constraint, Protocol):
    """A constraint that also computes the data after draft tokens.

    With any other constraint, an output has no draft tokens.
    """

    @property
    def takes_drafts(self) -> bool:
        """Whether outputs may have draft tokens.

        A constraint that wraps another constraint returns the inner constraint's value.
        """
        ...

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Fill `drafts` for a row that continues this output of the choice with draft tokens.

        Called on the event loop after `host_data_after` with the same output; `first` is the data of that call. The ids
        of the draft tokens may be set later. If the mask forbids a draft token, the data after this token is not read
        and may be skipped.
        """
        ...


class SequenceConstraint:
    """The constraint of one sequence, with the host data of its next tokens.

    Owned by the scheduler. It gets each `HostData` object early, when some of the tokens that determine the object's
    contents are not known yet.
    """

    __slots__ = ("_choice", "_constraint", "_drafts", "_later", "_num_told", "next")

    def __init__(self, constraint: Constraint, choice: int) -> None:
        self._constraint = constraint
        self._choice = choice
        self._num_told = -1  # output length at the last call of the constraint; -1 before the first call
        self.next = HostData()  # data for the token after the output of the last call
        # Data for tokens at later positions, by output length. Some tokens before these positions are not known yet.
        self._later: dict[int, HostData] = {}
        # The output length before the newest draft tokens, and the data after these draft tokens.
        self._drafts: tuple[int, DraftData] | None = None

    @property
    def takes_drafts(self) -> bool:
        """Whether rows of the sequence may have draft tokens."""
        return isinstance(self._constraint, DraftedConstraint) and self._constraint.takes_drafts

    def data_after(self, num_output: int, ids: list[int], num_prompt: int) -> HostData:
        """Return the host data for the token after `num_output` output tokens.

        `ids` contains the prompt and the known output.
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
        """Return the data for a row with `count` draft tokens after `num_output` output tokens.

        A sequence has at most one such row in flight. The last output tokens may still be unknown.
        """
        drafts = DraftData(count)
        self.data_after(num_output, ids, num_prompt)
        self._drafts = num_output, drafts
        if num_output == self._num_told:
            self._begin_drafts(Output(ids, num_prompt, num_output, num_output))
        return drafts

    def _begin_drafts(self, output: Output) -> None:
        """Request the data after draft tokens that follow this output, if there are any."""
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
        """Return the forced tokens that are known to follow `num_output` output tokens."""
        return self.next.forced[num_output - self._num_told :]

    def force(self, num_output: int, ids: tuple[int, ...]) -> None:
        """Set the forced tokens after `num_output` output tokens. Replays call this with the tokens of a record."""
        self.next.forced = (0,) * (num_output - self._num_told) + ids

    def advance(self, ids: list[int], num_prompt: int, wants_forced: bool = True) -> None:
        """Request the data of the token after `ids` (prompt and known output), unless it was already requested.

        `wants_forced` tells the constraint whether forced tokens will be appended.
        """
        num_output, num_before = len(ids) - num_prompt, max(self._num_told, 0)
        if self._num_told == num_output:
            return
        data = self._later.pop(num_output, None) or HostData()
        if self._later:  # forced tokens were appended since the last call
            self._later = {length: each for length, each in self._later.items() if length > num_output}
        if self.next.forced:
            data.forced = self.forced_after(num_output)
        self._num_told, self.next = num_output, data
        try:
            output = Output(ids, num_prompt, num_before, num_output, wants_forced)
            self._constraint.host_data_after(self._choice, output, data)
        except Exception as error:  # user code: an error ends only its own request
            logger.error("a constraint failed", exc_info=error)
            data.fail()
        self._begin_drafts(Output(ids, num_prompt, num_output, num_output))

    def release(self) -> None:
        """Set all missing host data without masks, so that no step waits for it. Called when the sequence has ended."""
        for data in (self.next, *self._later.values()):
            data.give()
        if self._drafts is not None:
            self._drafts[1].release()


class AllowedTokens:
    """A `Constraint` that allows the same token ids at every position. All ids must be below `vocab_size`."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self._bitmask = allowing_only(token_ids, -(-vocab_size // 32))

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Set the same mask for every token."""
        data.give(self._bitmask)

    @property
    def takes_drafts(self) -> bool:
        """True, because the masks after draft tokens are known."""
        return True

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Set the same mask after each draft token."""
        for data in drafts.after:
            data.give(self._bitmask)


class LogitsHook:
    """A `Constraint` that calls a user's function with each row's logits, in addition to the inner constraint.

    The function gets the ids of prompt and output, and the logits (float32 [V], on the device) after penalties and
    biases, before the grammar's mask. It changes the logits in place, or returns new logits. It runs on the device
    thread between the forward pass and sampling, so the step waits for it. If it raises an exception, its request ends
    with an error.
    """

    def __init__(self, function: Callable[[list[int], Any], Any], inner: Constraint | None) -> None:
        self._function = function
        self._inner = inner

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Make the sampler call the function for the next token, and request the inner constraint's data."""
        ids = output.ids[: output.num_prompt + output.num_output]

        def process(logits: Any) -> None:
            changed = self._function(ids, logits)
            if changed is not None:
                logits.copy_(changed)

        data.process_with(process)
        if self._inner is None:
            data.give()
        else:
            self._inner.host_data_after(choice, output, data)
