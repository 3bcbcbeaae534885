"""Waiting, between the forward and the sampling of a step, for what single rows need from the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.batch import UNKNOWN, Batch, Longs
from runtime.constraint import HostData
from runtime.worker.device import Device

logger = logging.getLogger("penstock.scheduler")

INT32 = np.dtype(np.int32)
GRACE_S = 0.001  # how long the sampling of all rows waits for some when the forward is done, at least
# Rows without their data are computed once more, so it pays to wait longer for many: each for its share of a step.
MAX_PATIENCE_S = 0.1


class Arrived(NamedTuple):
    """The host data of a step's rows; rows are indices into the R that sample."""

    rows: Longs  # [Q], those with a bitmask
    bitmasks: NDArray[np.int32]  # [Q, words]
    processes: Mapping[int, Callable[[Any], None]]  # by row
    without_token: Collection[int]  # rows that yield none: their data, or the token before, is missing
    failed: Collection[int]  # rows whose constraint failed

    def is_stuck(self, row: int) -> bool:
        """Whether this row's constraint failed, or left no token."""
        return row in self.failed or not self.bitmasks[self.rows == row].any(axis=1).all()


NOTHING = Arrived(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), {}, (), ())


class HostDataGate:
    """Waits for host data and remembers which sequences have no valid last token on the device.

    A step that was launched on a token that did not come yields none for that row either, until a batch brings
    the sequence's last token from the host.
    """

    def __init__(self, device: Device, vocab_size: int, grace_s: float = GRACE_S) -> None:
        self._device = device
        self._num_words = -(-vocab_size // 32)
        self._grace_s = grace_s
        self._began_s = 0.0  # when the last step came here
        self._without_last_token: set[int] = set()  # sequence indices

    def arrived(self, batch: Batch) -> Arrived:
        """What came until the forward, enqueued before, is done and a moment longer. Blocks until then at most."""
        sampling = batch.sampling
        if sampling is None or not sampling.host_data:
            return NOTHING
        wanted, without_token = sampling.host_data, set[int]()
        if self._without_last_token:
            without_token = {row for row in wanted if self._is_without_last_token(batch, sampling.rows[row])}
            wanted = {row: data for row, data in wanted.items() if row not in without_token}
        self._wait(wanted.values(), len(batch.counts))
        bitmasks: dict[int, NDArray[np.int32]] = {}
        processes, failed = {}, set[int]()
        for row, data in wanted.items():
            if not data.is_there:
                without_token.add(row)
                self._without_last_token.add(int(batch.sequence_indices[sampling.rows[row]]))
                continue
            bitmask, process = data.bitmask, data.process  # only now: before it was there they meant nothing
            if data.failed or not (bitmask is None or self._is_valid(bitmask)):
                failed.add(row)
                continue
            if bitmask is not None:
                bitmasks[row] = bitmask[: self._num_words]
            if process is not None:
                processes[row] = process
        together = NOTHING.bitmasks
        if bitmasks:
            together = np.concatenate(list(bitmasks.values())).reshape(len(bitmasks), self._num_words)
        return Arrived(np.array(list(bitmasks), np.int64), together, processes, without_token, failed)

    def _is_without_last_token(self, batch: Batch, row: int) -> bool:
        index = int(batch.sequence_indices[row])
        if index not in self._without_last_token:
            return False
        if batch.token_ids[int(batch.counts[: row + 1].sum()) - 1] == UNKNOWN:
            return True
        self._without_last_token.discard(index)
        return False

    def _is_valid(self, bitmask: NDArray[np.int32]) -> bool:
        if bitmask.dtype == INT32 and bitmask.ndim == 1 and len(bitmask) >= self._num_words:
            return True
        logger.error("a bitmask has the shape %s and the dtype %s", bitmask.shape, bitmask.dtype)
        return False

    def _wait(self, wanted: Collection[HostData], num_rows: int) -> None:
        """Until the forward is done and a moment longer, or all of these are there."""
        before_s, self._began_s = self._began_s, perf_counter()
        pending = [data for data in wanted if not data.is_there]
        if not pending:
            return
        patience_s = self._grace_s
        if patience_s:
            step_s = min(self._began_s - before_s, MAX_PATIENCE_S)
            patience_s = max(patience_s, step_s * len(pending) / num_rows)
        forward, end_s = self._device.record(), None
        came, last = Event(), None
        while pending:
            if end_s is None and forward.is_reached():
                end_s = perf_counter() + patience_s
            left_s = self._grace_s if end_s is None else end_s - perf_counter()
            if left_s > 0:  # for one of them: mostly they all come together
                if last is not pending[-1]:
                    last, came = pending[-1], Event()
                    last.when_there(came.set)
                came.wait(left_s)
            pending = [data for data in pending if not data.is_there]
            if end_s is not None and perf_counter() >= end_s:
                break
