"""Waiting, between the forward and the sampling of a step, for what single rows need from the host."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, wait
from time import perf_counter
from typing import NamedTuple

import numpy as np

from runtime.batch import UNKNOWN, Batch
from runtime.constraint import HostData
from runtime.worker.device import Device

logger = logging.getLogger("penstock.scheduler")

GRACE_S = 0.001  # how long the sampling of all rows waits for some when the forward is done, at least
# Rows without their data are computed once more, so it pays to wait longer for many: each for its share of a step.
MAX_PATIENCE_S = 0.1


def num_words(vocab_size: int) -> int:
    """Of the bitmask of one row."""
    return -(-vocab_size // 32)


class Arrived(NamedTuple):
    """The host data of a step's rows; rows are indices into the R that sample."""

    data: list[tuple[int, HostData]]  # of rows that are sampled with it
    without_token: frozenset[int]  # rows that yield none: their data, or the token before, is missing
    failed: frozenset[int]  # rows whose constraint failed

    def is_stuck(self, row: int) -> bool:
        """Whether this row's constraint failed, or left no token."""
        masks = (data.bitmask for each, data in self.data if each == row)
        return row in self.failed or any(mask is not None and not mask.any() for mask in masks)


NOTHING = Arrived([], frozenset(), frozenset())


class HostDataGate:
    """Waits for host data and remembers which sequences have no valid last token on the device.

    A step that was launched on a token that did not come yields none for that row either, until a batch brings
    the sequence's last token from the host.
    """

    def __init__(self, device: Device, vocab_size: int, grace_s: float = GRACE_S) -> None:
        self._device = device
        self._num_words = num_words(vocab_size)
        self._grace_s = grace_s
        self._began_s = 0.0  # when the last step came here
        self._without_last_token: set[int] = set()  # sequence indices

    def arrived(self, batch: Batch) -> Arrived:
        """What came until the forward, enqueued before, is done and a moment longer. Blocks until then at most."""
        sampling = batch.sampling
        if sampling is None or sampling.host_data is None:
            return NOTHING
        wanted, without_token = [], set()
        for entry in sampling.host_data:
            row = int(sampling.rows[entry.row])
            index = int(batch.sequence_indices[row])
            if self._is_without_last_token(batch, row, index):
                without_token.add(entry.row)
            else:
                wanted.append((entry, index))
        late = self._wait([entry.future for entry, _ in wanted], len(batch.counts))
        data, failed = [], set()
        for (row, future), index in wanted:
            if future in late:
                without_token.add(row)
                self._without_last_token.add(index)
                continue
            try:
                found = future.result()
            except (Exception, CancelledError):  # who set it has said why
                failed.add(row)
                continue
            if self._is_valid(found):
                data.append((row, found))
            else:
                failed.add(row)
        return Arrived(data, frozenset(without_token), frozenset(failed))

    def _is_without_last_token(self, batch: Batch, row: int, index: int) -> bool:
        if index not in self._without_last_token:
            return False
        if batch.token_ids[int(batch.counts[: row + 1].sum()) - 1] == UNKNOWN:
            return True
        self._without_last_token.discard(index)
        return False

    def _is_valid(self, data: HostData) -> bool:
        mask = data.bitmask
        if mask is None or (mask.dtype == np.int32 and mask.ndim == 1 and len(mask) >= self._num_words):
            return True
        logger.error("a bitmask has the shape %s and the dtype %s", mask.shape, mask.dtype)
        return False

    def _wait(self, futures: Iterable[Future[HostData]], num_rows: int) -> set[Future[HostData]]:
        """Until the forward is done and a moment longer; those of which nothing came."""
        before_s, self._began_s = self._began_s, perf_counter()
        pending = [future for future in futures if not future.done()]
        if not pending:
            return set()
        patience_s = self._grace_s
        if patience_s:
            step_s = min(self._began_s - before_s, MAX_PATIENCE_S)
            patience_s = max(patience_s, step_s * len(pending) / num_rows)
        forward, end_s = self._device.record(), None
        while pending:
            if end_s is None and forward.is_reached():
                end_s = perf_counter() + patience_s
            left_s = self._grace_s if end_s is None else end_s - perf_counter()
            if left_s > 0:  # for one of them: mostly they all come together, and each costs locks to wait for
                wait(pending[-1:], left_s)
            pending = [future for future in pending if not future.done()]
            if end_s is not None and perf_counter() >= end_s:
                break
        return set(pending)
