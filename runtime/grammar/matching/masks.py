"""Threads that compute token masks while the event loop and the forward pass run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import DraftData, HostData, Output, only_tokens, places_of, rows_that_allow
from runtime.grammar.backends.backend import Backend, Matcher
from runtime.grammar.matching.draft_walk import DraftWalk
from runtime.grammar.matching.position import Position

logger = logging.getLogger("penstock.grammar")

SLOW_S = 0.004  # an output whose mask takes longer moves to the slow thread
# A batch of n rows is slow if it takes more than BATCH_SLOW_S + n * ROW_SLOW_S. After a slow batch, all its outputs
# move to the slow thread, which measures the next mask of each output separately.
BATCH_SLOW_S, ROW_SLOW_S = 0.01, 0.0005


class MaskRequest(NamedTuple):
    position: Position
    output: Output
    data: HostData  # receives the mask


class DraftRequest(NamedTuple):
    position: Position
    output: Output  # the output before the draft tokens
    first: HostData  # the data of the token after `output`
    drafts: DraftData  # receives the masks after the drafts


Request: TypeAlias = "MaskRequest | DraftRequest"


class MaskThread:
    """Computes the masks of a step together, on two threads.

    Outputs with slow masks use the second thread, so that other outputs never wait for them.

    If a mask allows only one token, this token is forced. The next masks are then computed too, until a mask allows
    several tokens or `max_forced` tokens are known. All forced tokens are published together. Their masks are kept, in
    case the scheduler does not append the tokens at once.
    """

    def __init__(self, backend: Backend, eos_ids: Iterable[int] = (), max_forced: int = 0) -> None:
        self._backend = backend
        self._ends = places_of(eos_ids)  # mask bits of the tokens that the backend allows where an output may end
        self._max_forced = max_forced
        self._num_words = backend.num_words
        self._slow = _Lane("penstock-masks-slow", self._compute_each, self._compute_each_draft)
        self._fast = _Lane("penstock-masks", self._compute, self._compute_drafts)

    def submit(self, position: Position, output: Output, data: HostData) -> None:
        """Request the mask of the token after `output`. Returns at once.

        Call this on the event loop. All requests from one turn of the loop form one batch.
        """
        self._submit(MaskRequest(position, output, data))

    def submit_drafts(self, position: Position, output: Output, first: HostData, drafts: DraftData) -> None:
        """Request the masks after the draft tokens that follow `output`. Returns at once.

        The masks are computed when the ids of the draft tokens are known. Call this on the event loop, after `submit`
        with the same output and `first`.
        """
        self._submit(DraftRequest(position, output, first, drafts))

    def _submit(self, request: Request) -> None:
        position = request.position
        if position.num_submitted == position.num_done:  # the thread may change only if no request is pending
            position.on_slow_thread = position.slow
        position.num_submitted += 1
        (self._slow if position.on_slow_thread else self._fast).submit(request)

    def close(self) -> None:
        """End the threads after their current work."""
        self._fast.close()
        self._slow.close()

    def _compute(self, requests: Sequence[MaskRequest]) -> None:
        """Compute all masks together, or one by one if two requests are for the same position."""
        if len({request.position for request in requests}) < len(requests):
            self._compute_each(requests)
            return
        began_s = time.perf_counter()
        rows = [request for request in requests if self._advance(request)]
        self._fill(rows)
        if time.perf_counter() - began_s > BATCH_SLOW_S + ROW_SLOW_S * len(rows):
            for request in rows:
                # The slow thread resets `slow` if the next mask is fast.
                request.position.slow = True

    def _compute_each(self, requests: Sequence[MaskRequest]) -> None:
        for request in requests:
            began_s = time.perf_counter()
            if self._advance(request):
                self._fill([request])
            request.position.slow = time.perf_counter() - began_s > SLOW_S

    def _compute_each_draft(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            began_s = time.perf_counter()
            self._compute_drafts([request])
            request.position.slow = time.perf_counter() - began_s > SLOW_S

    def _compute_drafts(self, requests: Sequence[DraftRequest]) -> None:
        """Compute the masks after the draft tokens of all rows, first after each row's first draft token, and so on."""
        began_s = time.perf_counter()
        walks = []
        for position, output, first, drafts in requests:
            # If the position is not at the end of `output`, the row did not yield all these tokens, and no step waits
            # for this data.
            if position.num_seen == output.num_output and first.is_there:
                walks.append(DraftWalk(position, first, drafts))
            else:
                drafts.skip_from(0)
        while walks:
            walks = [walk for walk in walks if _goes_on(walk, self._num_words)]
            self._fill_after_drafts(walks)
        if time.perf_counter() - began_s > BATCH_SLOW_S + ROW_SLOW_S * len(requests):
            for request in requests:
                request.position.slow = True

    def _fill_after_drafts(self, walks: Sequence[DraftWalk]) -> None:
        """Compute one mask for each of these walks. If a grammar fails, only its own walk ends."""
        try:
            for walk, mask in zip(walks, self._masks([walk.position for walk in walks])):
                walk.give(mask)
        except Exception as error:
            if len(walks) > 1:
                for walk in walks:
                    self._fill_after_drafts([walk])
            else:
                logger.info("A grammar cannot continue after drafts: %.300s", error)
                walks[0].stop()

    def _masks(self, positions: Sequence[Position]) -> NDArray[np.int32]:
        """Return the masks of the next token of each position, int32 [n, words]."""
        masks = np.zeros((len(positions), self._num_words), np.int32)
        if not positions:
            return masks
        self._backend.fill_masks([_matcher(position) for position in positions], masks)
        ending = rows_that_allow(masks, self._ends)
        for row, position in enumerate(positions):
            if row in ending or position.opened_by is not None:
                position.finish_mask(masks[row], row in ending)
        return masks

    def _advance(self, request: MaskRequest) -> bool:
        """Advance the position. Return True if the backend must compute a mask, False if the request is complete."""
        position = request.position
        try:
            if not position.advance(request.output):
                request.data.give(position.free_mask(self._num_words))
            elif position.forced:
                request.data.give(position.forced_masks[0], tuple(position.forced))
            elif position.next_mask is not None:
                request.data.give(position.next_mask)
            else:
                return True
        # The grammar library failed, or the grammar exceeds a limit. Only this output fails.
        except Exception as error:
            _fail(request.data, error)
        return False

    def _fill(self, requests: Sequence[MaskRequest]) -> None:
        """Complete all requests. Rows with a forced token need a further mask; these masks are computed together."""
        while requests:
            requests = self._fill_once(requests)

    def _fill_once(self, requests: Sequence[MaskRequest]) -> list[MaskRequest]:
        """Compute one mask per request.

        Return the requests whose matcher has consumed a forced token and which need a further mask. All other requests
        are complete.
        """
        try:
            masks = self._masks([request.position for request in requests])
        except Exception as error:
            if len(requests) > 1:  # compute rows one by one, so that only the failing row fails
                return [further for request in requests for further in self._fill_once([request])]
            _fail(requests[0].data, error)
            return []
        wanted = self._max_forced > 0 and any(request.output.wants_forced for request in requests)
        only = only_tokens(masks) if wanted else {}
        further = []
        for row, (request, mask) in enumerate(zip(requests, masks, strict=True)):
            position = request.position
            if row in only and self._continues_run(request, only[row]):
                if _force(request, only[row], mask):
                    further.append(request)
            elif position.forced:
                position.next_mask = mask
                request.data.give(position.forced_masks[0], tuple(position.forced))
            else:
                request.data.give(mask)
        return further

    def _continues_run(self, request: MaskRequest, token_id: int) -> bool:
        """Whether to force `token_id`, the only allowed token, and compute the mask after it."""
        position = request.position
        if not request.output.wants_forced or len(position.forced) >= self._max_forced:
            return False
        return not position.ends_by(token_id)


class _Lane:
    """A thread that takes all requests in its inbox together.

    The event loop wakes the thread once per turn, at the end of the turn. If the first request of a turn woke the
    thread, the thread would compete with the event loop for the GIL, and would see only a part of the step's requests.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[Sequence[MaskRequest]], None],
        compute_drafts: Callable[[Sequence[DraftRequest]], None],
    ) -> None:
        self._submitted: list[Request] = []  # requests of the current turn of the event loop
        self._inbox: SimpleQueue[Sequence[Request] | None] = SimpleQueue()
        self._compute, self._compute_drafts = compute, compute_drafts
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._submitted.append(request)
        if len(self._submitted) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self._flush)
        except RuntimeError:  # no loop is running
            self._flush()

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _flush(self) -> None:
        submitted, self._submitted = self._submitted, []
        self._inbox.put(submitted)

    def _run(self) -> None:
        is_open = True
        while is_open:
            parts = [self._inbox.get()]
            while not self._inbox.empty():
                parts.append(self._inbox.get())
            is_open = None not in parts
            requests = [request for part in parts if part is not None for request in part]
            masks = [request for request in requests if isinstance(request, MaskRequest)]
            drafts: list[DraftRequest] = []
            for request in requests:
                if isinstance(request, DraftRequest):
                    if request.drafts.ids is not None:
                        drafts.append(request)
                    else:  # the request returns to the inbox when the draft model has proposed the ids
                        request.drafts.when_proposed(partial(self._inbox.put, [request]))
            try:
                if masks:
                    self._compute(masks)
                if drafts:
                    self._compute_drafts(drafts)
            except Exception:  # an internal error: these outputs fail, and the thread continues
                logger.exception("Grammar masks could not be computed.")
                for request in masks:
                    request.data.fail()
                for request in drafts:
                    request.drafts.skip_from(0)
            for request in (*masks, *drafts):
                request.position.num_done += 1


def _goes_on(walk: DraftWalk, num_words: int) -> bool:
    """Advance a walk. Return whether the new position needs a mask. If the grammar fails, the walk ends."""
    try:
        return walk.go_on(num_words)
    except Exception as error:
        logger.info("A grammar cannot continue after drafts: %.300s", error)
        walk.stop()
        return False


def _matcher(position: Position) -> Matcher:
    """Return the matcher of a position. Raises RuntimeError if the constraint has not begun."""
    matcher = position.matcher
    if matcher is None:
        raise RuntimeError("A mask is computed for an output whose constraint has not begun.")
    return matcher


def _force(request: MaskRequest, token_id: int, mask: NDArray[np.int32]) -> bool:
    """Let the matcher consume `token_id`, the only token that `mask` allows, and return True.

    If the matcher refuses the token, publish all forced tokens including this one, and return False. The output then
    fails when the mask after this token is requested.
    """
    position = request.position
    with suppress(Exception):
        if position.force(token_id, mask):
            return True
    request.data.give([*position.forced_masks, mask][0], (*position.forced, token_id))
    return False


def _fail(data: HostData, error: Exception) -> None:
    logger.info("A grammar cannot continue: %.300s", error)
    data.fail()
