"""The threads that compute which tokens come next, beside the event loop and the forward."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import HostData, Output, allowing_only, give, refuse
from runtime.grammar.backend import Backend
from runtime.grammar.position import Position

logger = logging.getLogger("penstock.grammar")

SLOW_S = 0.004  # a mask that takes so long is computed apart from the others
BATCH_SLOW_S, ROW_SLOW_S = (
    0.01,
    0.0005,
)  # of a whole batch, and more for each row: then each of them is measured


class Ask(NamedTuple):
    position: Position
    output: Output
    answer: Future[HostData]


class MaskThread:
    """Takes what is asked in one step together and computes it in parallel, on two threads of its own.

    Outputs whose masks take long are on the second one, so that nobody else waits for them. Where a mask leaves one
    token, the masks behind it are computed too, up to the first that leaves a choice or `max_forced` tokens: the run
    of these tokens is told at once, and each mask is computed once, whether the run is used or not.
    """

    def __init__(self, backend: Backend, max_forced: int = 0) -> None:
        self._backend = backend
        self._max_forced = max_forced
        self._num_words = backend.num_words
        self._slow = _Lane("penstock-masks-slow", self._compute_each)
        self._fast = _Lane("penstock-masks", self._compute)

    def ask(self, position: Position, output: Output, answer: Future[HostData]) -> None:
        """What applies to the token after these. Returns at once."""
        if position.num_asked == position.num_answered:  # else behind what it was asked before
            position.on_slow_thread = position.slow
        position.num_asked += 1
        (self._slow if position.on_slow_thread else self._fast).put(Ask(position, output, answer))

    def close(self) -> None:
        """End the threads, when what they compute now is done."""
        self._fast.close()
        self._slow.close()

    def _compute(self, asks: Sequence[Ask]) -> None:
        """Masks for all of these, together; what a position was asked twice, one after the other."""
        began_s = time.perf_counter()
        rows: list[Ask] = []
        taken: set[int] = set()
        for ask in asks:
            if id(ask.position) in taken:
                self._fill(rows)
                rows, taken = [], set()
            if self._advance(ask):
                rows.append(ask)
                taken.add(id(ask.position))
        if not rows:
            return
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
        """Whether the backend is to be asked; otherwise the future has its result."""
        position = ask.position
        try:
            if not position.advance(ask.output):
                give(ask.answer, HostData(bitmask=position.free_mask(self._num_words)))
            elif position.forced:
                give(ask.answer, self._forced(position.forced))
            elif position.kept is not None:
                give(ask.answer, HostData(bitmask=position.kept))
            else:
                return True
        except Exception as error:  # this output's border: foreign code, or a grammar beyond its limits
            _fail(ask.answer, error)
        return False

    def _fill(self, asks: Sequence[Ask]) -> None:
        """Answer all of these. Who must go on by one token is asked for the next place, all together."""
        forced: list[tuple[Ask, int]] = []
        for ask, mask in self._masks(asks):
            token_id = ask.position.only_token(mask) if self._max_forced else None
            if token_id is None:
                give(ask.answer, HostData(bitmask=mask))
            else:
                forced.append((ask, token_id))
        while forced:
            forced = self._go_on(forced)

    def _masks(self, asks: Sequence[Ask]) -> list[tuple[Ask, NDArray[np.int32]]]:
        """What each of these positions allows next, int32 [words]. Where that fails, who asked knows it."""
        masks = np.zeros((len(asks), self._num_words), np.int32)
        try:
            self._backend.fill_masks([ask.position.matcher for ask in asks if ask.position.matcher], masks)
            for ask, mask in zip(asks, masks, strict=True):
                ask.position.finish_mask(mask)
        except Exception as error:
            if len(asks) > 1:  # one of them, which the others shall not pay for
                return [found for ask in asks for found in self._masks([ask])]
            _fail(asks[0].answer, error)
            return []
        return list(zip(asks, masks, strict=True))

    def _go_on(self, forced: Sequence[tuple[Ask, int]]) -> list[tuple[Ask, int]]:
        """Take these tokens; those behind which there is one token again. The others are answered."""
        taken = [ask for ask, token_id in forced if self._force(ask, token_id)]
        further = []
        for ask, mask in self._masks(taken) if taken else ():
            position = ask.position
            token_id = position.only_token(mask)
            if token_id is not None and len(position.forced) < self._max_forced:
                further.append((ask, token_id))
            else:
                position.kept = mask
                give(ask.answer, self._forced(position.forced))
        return further

    def _force(self, ask: Ask, token_id: int) -> bool:
        """False, and answered, where the grammar ends there by a limit: that is an error behind these tokens."""
        known = (*ask.position.forced, token_id)
        with suppress(Exception):  # as in `_advance`; the same happens again when the output has come there
            if ask.position.force(token_id):
                return True
        give(ask.answer, self._forced(known))
        return False

    def _forced(self, ids: Sequence[int]) -> HostData:
        return HostData(bitmask=allowing_only(ids[:1], self._num_words), forced=tuple(ids))


class _Lane:
    """A thread, started when it is first needed, that takes all that waits at a time."""

    def __init__(self, name: str, compute: Callable[[Sequence[Ask]], None]) -> None:
        self._name = name
        self._compute = compute
        self._inbox: SimpleQueue[Ask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, ask: Ask) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._inbox.put(ask)

    def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            asks = [self._inbox.get()]
            while not self._inbox.empty():
                asks.append(self._inbox.get())
            taken = [ask for ask in asks if ask is not None]
            try:
                self._compute(taken)
            except Exception as error:  # a mistake of ours: it costs these outputs, not all that come
                logger.exception("masks of grammars could not be computed")
                for ask in taken:
                    refuse(ask.answer, error)
            for ask in taken:
                ask.position.num_answered += 1
            if len(taken) < len(asks):
                return


def _fail(answer: Future[HostData], error: Exception) -> None:
    logger.info("a grammar can go no further: %.300s", error)
    refuse(answer, error)
