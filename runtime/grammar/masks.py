"""The threads that compute which tokens come next, beside the event loop and the forward."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import HostData, Output, only_tokens, places_of, rows_that_allow
from runtime.grammar.backend import Backend
from runtime.grammar.position import Position

logger = logging.getLogger("penstock.grammar")

SLOW_S = 0.004  # a mask that takes so long is computed apart from the others
# Of a whole batch, and more for each row: one that takes longer has each of its masks measured.
BATCH_SLOW_S, ROW_SLOW_S = 0.01, 0.0005


class Ask(NamedTuple):
    position: Position
    output: Output
    data: HostData


class MaskThread:
    """Takes what is asked in one step together and computes it in parallel, on two threads of its own.

    Outputs whose masks take long are on the second one, so that nobody else waits for them. Where a mask leaves one
    token, the masks behind it are computed too, up to the first that leaves a choice or `max_forced` tokens: the run
    of these tokens is told at once, and each mask is computed once, whether the run is used or not.
    """

    def __init__(self, backend: Backend, eos_ids: Iterable[int] = (), max_forced: int = 0) -> None:
        self._backend = backend
        self._ends = places_of(eos_ids)  # which the backend allows where an output may end
        self._max_forced = max_forced
        self._num_words = backend.num_words
        self._slow = _Lane("penstock-masks-slow", self._compute_each)
        self._fast = _Lane("penstock-masks", self._compute)

    def ask(self, position: Position, output: Output, data: HostData) -> None:
        """What applies to the token after these. Returns at once; on the event loop, which hands on all that it asks in
        one turn together.
        """
        if position.num_asked == position.num_answered:  # else behind what it was asked before
            position.on_slow_thread = position.slow
        position.num_asked += 1
        (self._slow if position.on_slow_thread else self._fast).ask(Ask(position, output, data))

    def close(self) -> None:
        """End the threads, when what they compute now is done."""
        self._fast.close()
        self._slow.close()

    def _compute(self, asks: Sequence[Ask]) -> None:
        """Masks for all of these, together; where a position was asked twice, one after the other."""
        if len({ask.position for ask in asks}) < len(asks):
            self._compute_each(asks)
            return
        began_s = time.perf_counter()
        rows = [ask for ask in asks if self._advance(ask)]
        self._fill(rows)
        if time.perf_counter() - began_s > BATCH_SLOW_S + ROW_SLOW_S * len(rows):
            for ask in rows:
                ask.position.slow = True  # until the other thread has seen that it is not

    def _compute_each(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            began_s = time.perf_counter()
            if self._advance(ask):
                self._fill([ask])
            ask.position.slow = time.perf_counter() - began_s > SLOW_S

    def _advance(self, ask: Ask) -> bool:
        """Whether the backend is to be asked; otherwise the data is there."""
        position = ask.position
        try:
            if not position.advance(ask.output):
                ask.data.give(position.free_mask(self._num_words))
            elif position.forced:
                ask.data.give(position.forced_masks[0], tuple(position.forced))
            elif position.kept is not None:
                ask.data.give(position.kept)
            else:
                return True
        except Exception as error:  # this output's border: foreign code, or a grammar beyond its limits
            _fail(ask.data, error)
        return False

    def _fill(self, asks: Sequence[Ask]) -> None:
        """Answer all of these. Who must go on by one token is asked for the next place, all together."""
        while asks:
            asks = self._fill_once(asks)

    def _fill_once(self, asks: Sequence[Ask]) -> list[Ask]:
        """Those behind which there is one token, which they have taken; the others are answered."""
        masks = np.zeros((len(asks), self._num_words), np.int32)
        try:
            self._backend.fill_masks([ask.position.matcher for ask in asks if ask.position.matcher], masks)
            ending = rows_that_allow(masks, self._ends)
            for row, ask in enumerate(asks):
                if row in ending or ask.position.opened_by is not None:
                    ask.position.finish_mask(masks[row], row in ending)
        except Exception as error:
            if len(asks) > 1:  # one of them, which the others shall not pay for
                return [further for ask in asks for further in self._fill_once([ask])]
            _fail(asks[0].data, error)
            return []
        wanted = self._max_forced > 0 and any(ask.output.wants_forced for ask in asks)
        only = only_tokens(masks) if wanted else {}
        further = []
        for row, (ask, mask) in enumerate(zip(asks, masks, strict=True)):
            position = ask.position
            if row in only and self._goes_on(ask, only[row]):
                if _force(ask, only[row], mask):
                    further.append(ask)
            elif position.forced:
                position.kept = mask
                ask.data.give(position.forced_masks[0], tuple(position.forced))
            else:
                ask.data.give(mask)
        return further

    def _goes_on(self, ask: Ask, token_id: int) -> bool:
        """Whether what comes behind this token, the only one that is allowed, is to be found out too."""
        position = ask.position
        if not ask.output.wants_forced or len(position.forced) >= self._max_forced:
            return False
        return not position.ends_by(token_id)


class _Lane:
    """A thread that takes all that waits in its inbox at a time.

    It is woken once for all that the event loop asks in one turn, when that is over: woken at the first of a step's
    rows, it would wait for Python's lock on a processor that the loop or the forward is using.
    """

    def __init__(self, name: str, compute: Callable[[Sequence[Ask]], None]) -> None:
        self._asked: list[Ask] = []  # in this turn of the event loop
        self._inbox: SimpleQueue[list[Ask] | None] = SimpleQueue()
        self._compute = compute
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, ask: Ask) -> None:
        self._asked.append(ask)
        if len(self._asked) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self._hand_on)
        except RuntimeError:  # there is none
            self._hand_on()

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _hand_on(self) -> None:
        asked, self._asked = self._asked, []
        self._inbox.put(asked)

    def _run(self) -> None:
        is_open = True
        while is_open:
            parts = [self._inbox.get()]
            while not self._inbox.empty():
                parts.append(self._inbox.get())
            is_open = None not in parts
            taken = [ask for part in parts if part is not None for ask in part]
            try:
                self._compute(taken)
            except Exception:  # a mistake of ours: it costs these outputs, not all that come
                logger.exception("masks of grammars could not be computed")
                for ask in taken:
                    ask.data.fail()
            for ask in taken:
                ask.position.num_answered += 1


def _force(ask: Ask, token_id: int, mask: NDArray[np.int32]) -> bool:
    """False, and answered, where the grammar ends there by a limit: that is an error behind these tokens."""
    position = ask.position
    with suppress(Exception):  # as in `_advance`; the same happens again when the output has come there
        if position.force(token_id, mask):
            return True
    ask.data.give([*position.forced_masks, mask][0], (*position.forced, token_id))
    return False


def _fail(data: HostData, error: Exception) -> None:
    logger.info("a grammar can go no further: %.300s", error)
    data.fail()
