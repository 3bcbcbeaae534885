"""Waits for host data (grammar masks, logits processors) after the forward pass of a step, before its sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from threading import Event
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.batch import UNKNOWN, Batch, Ints, Longs
from runtime.constraint import HostData
from runtime.worker.device import Device

logger = logging.getLogger("penstock.scheduler")

INT32 = np.dtype(np.int32)
GRACE_S = 0.001  # after the forward pass, sampling waits at least this long for host data
# Longest wait in seconds, if the wait depends on the step's time. Sampling waits longer if more rows are late, because
# late rows must be recomputed: for each late row, it waits for one row's share of the step's time.
MAX_PATIENCE_S = 0.1


class Arrived(NamedTuple):
    """The host data of a step. A row here is an index into the N sampled positions."""

    rows: Longs  # [Q], rows with a bitmask
    bitmasks: NDArray[np.int32]  # [Q, words]
    processes: Mapping[int, Callable[[Any], None]]  # row -> its logits processor
    without_token: Collection[int]  # rows without host data, or without a valid previous token
    failed: Collection[int]  # rows whose constraint failed
    # row -> (token ids, values to add to their logits)
    biases: Mapping[int, tuple[Longs, NDArray[np.float32]]] = MappingProxyType({})

    def is_stuck(self, row: int) -> bool:
        """Return whether this row's constraint failed or allowed no token."""
        return row in self.failed or not self.bitmasks[self.rows == row].any(axis=1).all()


NO_HOST_DATA = Arrived(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), {}, (), ())


class HostDataGate:
    """Waits for host data, and tracks the sequences whose last token on the device is not valid.

    If a row yields no token, later rows of its sequence yield none either, until a batch contains the sequence's last
    token as a known id.
    """

    def __init__(self, device: Device, vocab_size: int, grace_s: float = GRACE_S) -> None:
        self._device = device
        self._num_words = -(-vocab_size // 32)
        self._grace_s = grace_s
        self._began_s = 0.0  # time at which the last step called `arrived`
        # Indices of the sequences whose last token on the device is not valid.
        self._without_last_token: set[int] = set()

    def arrived(self, batch: Batch) -> Arrived:
        """Return the host data of a step.

        Blocks until all data has arrived, or until shortly after the forward pass.
        """
        sampling = batch.sampling
        if sampling is None or not sampling.host_data:
            return NO_HOST_DATA
        requested, without_token = sampling.host_data, set[int]()
        if self._without_last_token:
            without_token = {row for row in requested if self._is_without_last_token(batch, sampling.row_of[row])}
            requested = {row: data for row, data in requested.items() if row not in without_token}
        self._wait(requested, sampling.row_of, len(batch.counts))
        bitmasks: dict[int, NDArray[np.int32]] = {}
        processes, failed, biases = {}, set[int](), {}
        for row, data in requested.items():
            if not data.is_there:
                without_token.add(row)
                self._without_last_token.add(int(batch.sequence_indices[sampling.row_of[row]]))
                continue
            if data.skipped:
                without_token.add(row)
                continue
            # Read only after `is_there` is true, because they are not valid before.
            bitmask, process = data.bitmask, data.process
            if data.failed or not (bitmask is None or self._is_valid(bitmask)):
                failed.add(row)
                continue
            if bitmask is not None:
                bitmasks[row] = bitmask[: self._num_words]
            if process is not None:
                processes[row] = process
            if data.biases is not None:
                biases[row] = data.biases
        stacked = NO_HOST_DATA.bitmasks
        if bitmasks:
            stacked = np.concatenate(list(bitmasks.values())).reshape(len(bitmasks), self._num_words)
        return Arrived(np.array(list(bitmasks), np.int64), stacked, processes, without_token, failed, biases)

    def _is_without_last_token(self, batch: Batch, row: int) -> bool:
        index = int(batch.sequence_indices[row])
        if index not in self._without_last_token:
            return False
        # The first token of a row is the sequence's last token. Further tokens may be draft tokens.
        if batch.token_ids[int(batch.counts[:row].sum())] == UNKNOWN:
            return True
        self._without_last_token.discard(index)
        return False

    def _is_valid(self, bitmask: NDArray[np.int32]) -> bool:
        if bitmask.dtype == INT32 and bitmask.ndim == 1 and len(bitmask) >= self._num_words:
            return True
        logger.error("A bitmask has the wrong shape %s or dtype %s.", bitmask.shape, bitmask.dtype)
        return False

    def _wait(self, requested: Mapping[int, HostData], row_of: Ints, num_rows: int) -> None:
        """Wait until all requested host data has arrived, or until shortly after the forward pass."""
        before_s, self._began_s = self._began_s, perf_counter()
        pending = [data for data in requested.values() if not data.is_there]
        if not pending:
            return
        patience_s = self._grace_s
        if patience_s:
            step_s = min(self._began_s - before_s, MAX_PATIENCE_S)
            late_rows = {int(row_of[index]) for index, data in requested.items() if not data.is_there}
            patience_s = max(patience_s, step_s * len(late_rows) / num_rows)
        forward, end_s = self._device.record(), None
        arrived, last = Event(), None
        while pending:
            if end_s is None and forward.is_reached():
                end_s = perf_counter() + patience_s
            left_s = self._grace_s if end_s is None else end_s - perf_counter()
            if left_s > 0:  # usually all data arrives together, so waiting for the last one is enough
                if last is not pending[-1]:
                    last, arrived = pending[-1], Event()
                    last.when_there(arrived.set)
                arrived.wait(left_s)
            pending = [data for data in pending if not data.is_there]
            if end_s is not None and perf_counter() >= end_s:
                break
