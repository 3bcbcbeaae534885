"""Publishes events of cached pages over ZeroMQ, in the message format of SGLang and vLLM (--kv-events-config).

A message has three frames: the topic, the batch number from 0 (8 bytes, big-endian), and a batch in msgpack: [time,
events, replica index]. A subscriber that missed batches sends the number of the first missing one to the replay
address. The subscriber receives the batches from this number on that the publisher still keeps, as (number, batch), and
then (-1, empty).
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import Any

from runtime.config.plan import KvEventsPlan
from runtime.errors import ConfigurationError
from runtime.kv_cache.page_events import Event

logger = logging.getLogger("penstock.core")

POLL_S = 0.1  # interval in seconds at which replay requests are answered
CLOSE_TIMEOUT_S = 1.0
END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Publishes the event batches of one replica from a thread.

    If the queue of the thread is full, a batch is dropped and its number is skipped. Raises `ConfigurationError` if
    packages are missing or an address cannot be used.
    """

    def __init__(self, plan: KvEventsPlan, index: int) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigurationError(
                f"--kv-events-config needs {error.name}: pip install 'penstock[kv-events]'."
            ) from error
        self._index = index
        self._topic = plan.topic.encode()
        self._encode = msgspec.msgpack.encode
        self._next = 0  # number of the next batch
        self._queue: queue.Queue[tuple[int, list[Any]] | None] = queue.Queue(plan.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=plan.buffer_steps)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, int(CLOSE_TIMEOUT_S * 1000))
        self._publish, self._replay = self._context.socket(zmq.PUB), None
        self._publish.set_hwm(plan.hwm)
        address = plan.endpoint
        try:
            address = address_of(plan.endpoint, index)
            is_ours = "*" in address or "::" in address or not address.startswith("tcp:")
            (self._publish.bind if is_ours else self._publish.connect)(address)
            if plan.replay_endpoint is not None:
                address = address_of(plan.replay_endpoint, index)
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(f"--kv-events-config: {address} cannot be used ({error}).") from error
        self._thread = Thread(target=self._run, name="penstock-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Queue a batch of events for sending. Returns immediately."""
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, [time.time(), events, self._index]))
        except queue.Full:  # subscribers notice the gap in the numbers
            logger.warning("KV events: the queue is full, and batch %d was dropped.", number)

    def close(self) -> None:
        """Send the queued batches and close the sockets. Blocks for about `CLOSE_TIMEOUT_S`."""
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            logger.warning("KV events: the queue is full at shutdown, and its batches were dropped.")
            self._queue.queue.clear()
            self._queue.put(None)
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        while True:
            try:
                self._answer_replay()
                item = self._queue.get(timeout=POLL_S if self._replay is not None else None)
                if item is None:
                    return
                number, batch = item[0].to_bytes(8, "big"), self._encode(item[1])
                self._publish.send_multipart((self._topic, number, batch))
                self._kept.append((number, batch))
            except queue.Empty:
                continue
            except Exception:  # the thread must go on; subscribers notice the gap in the numbers
                logger.exception("KV events: a batch could not be sent.")

    def _answer_replay(self) -> None:
        if self._replay is None or not self._replay.poll(0):
            return
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("KV events: a replay request has the wrong format and was ignored.")
            return
        for number, batch in self._kept:
            if number >= frames[2]:
                self._replay.send_multipart((frames[0], b"", number, batch))
        self._replay.send_multipart((frames[0], b"", END, b""))


def address_of(endpoint: str, index: int) -> str:
    """Return a replica's address: its index is added to a TCP port, or appended to another endpoint as a suffix."""
    if not index:
        return endpoint
    if endpoint.startswith("tcp:"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + index}"
    return f"{endpoint}_dp{index}"
