"""The KV pages that a prefill server offers to decode servers.

Each rank of a prefill server keeps the pages of its prompts in memory (`OfferedPages`), and answers the requests of
decode servers for them (see `transfer_protocol.py`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

from runtime.errors import ConfigurationError
from runtime.page_store.protocol import StoreSpace
from runtime.page_store.transfer_protocol import (
    ANSWER,
    BEAT_S,
    EXISTS,
    GET,
    HEAD,
    KEY_BYTES,
    MAX_GREETING,
    MAX_KEYS,
    PROGRESS,
    WATCH,
    PromptState,
    greeting,
)

logger = logging.getLogger("penstock.core")

MAX_CONNECTIONS = 512  # maximum number of connections to one rank of a prefill server
# Maximum number of keys in the unanswered requests of one host. They take about 200 MB. A request to watch a prompt is
# unanswered until the watch ends.
MAX_HOST_KEYS = 1 << 21
REQUEST_S = 10.0  # seconds in which a decode server must send its greeting, or the rest of a request
SEND_S = 30.0  # seconds in which one answer must be sent
IDLE_S = 3600.0  # maximum number of seconds between two requests of a connection
DEFAULT_GB = 4.0  # memory for the offered pages of a rank, in 10^9 bytes
MAX_ENDED = 4096  # maximum number of ended prompts that are remembered
ENDED_S = 5.0  # seconds for which an ended prompt is remembered


@dataclass(slots=True, eq=False)
class Watch:
    """A reader that waits for the pages `keys` of a prompt."""

    prompt: bytes
    keys: Sequence[bytes]
    wake: Callable[[], None]  # called on any thread after more pages arrive, or the prompt begins or ends
    count: int = 0  # number of leading keys that had a page when the reader last looked


# The open stores of an engine in its own process, by address. Its decode replicas read them without connections.
LocalPages: TypeAlias = "dict[tuple[str, int], OfferedPages]"


class OfferedPages:
    """The pages that one rank of a prefill server offers. If memory is short, the oldest are dropped. A `PageStore`."""

    def __init__(self, space: StoreSpace, config: Mapping[str, Any], local: LocalPages | None = None) -> None:
        """Start to listen at the rank's port. If `space.page_bytes` is 0 (a store only for lookups), do not listen.

        `local` are the open stores of the engine in this process, to which this one is added until it is closed.
        Raises `ConfigurationError` if the address cannot be used.
        """
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._max_bytes = int(float(config.get("max_gb", DEFAULT_GB)) * 10**9)
        self._num_bytes = 0
        self._announced: set[bytes] = set()  # keys of the pages that all ranks have
        self._pending: Counter[bytes] = Counter()  # last key of a prompt -> number of requests with this prompt
        self._ended: OrderedDict[bytes, float] = OrderedDict()  # last key of a prompt -> time at which it ended
        self._watches: set[Watch] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._local = {} if local is None else local
        self.greeting = greeting(space)  # a decode server must send this line first
        self.num_groups = space.num_groups
        if space.page_bytes:
            port = int(config["port"]) + space.group * space.num_ranks + space.rank
            address = (str(config["host"]), port)
            try:
                self._server = _Server(address, self, self.greeting)
            except OSError as error:
                raise ConfigurationError(
                    f"--disaggregation-bootstrap-port: {address[0]}:{address[1]} cannot be used: {error.strerror}."
                ) from error
            self._address = address
            self._local[address] = self
            threading.Thread(target=self._server.serve_forever, name="penstock-offer", daemon=True).start()

    def exists(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return next((number for number, key in enumerate(keys) if key not in self._pages), len(keys))

    def note_prompts(self, begun: Iterable[bytes], ended: Iterable[bytes], stored: Iterable[bytes] = ()) -> None:
        """Record which prompts have arrived, and which have ended so that no more of their pages will come.

        A prompt is named by the key of its last full page. If several requests have the same prompt, its key occurs
        once for each of them. `stored` are the keys of pages that all ranks have stored, which readers may now fetch.
        """
        begun, ended = [*begun], [*ended]
        named = {*begun, *ended}
        with self._lock:
            self._pending.update(begun)
            for key in ended:
                self._pending[key] -= 1
                if self._pending[key] <= 0:
                    del self._pending[key]
                self._ended[key] = time.monotonic()
                self._ended.move_to_end(key)
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
            self._announced.update(key for key in stored if key in self._pages)
            changed = [watch for watch in self._watches if watch.prompt in named or self._has_next(watch)]
        for watch in changed:
            watch.wake()

    @contextlib.contextmanager
    def watching(self, prompt: bytes, keys: Sequence[bytes], wake: Callable[[], None]) -> Iterator[Watch]:
        """Yield a watch. Inside the context, `wake` is called on any thread when the watch's `progress` changes."""
        watch = Watch(prompt, keys, wake)
        with self._lock:
            self._watches.add(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.discard(watch)

    def progress(self, watch: Watch) -> tuple[int, PromptState]:
        """Return how many of the leading keys of a watch have a page on all ranks, and the state of its prompt."""
        state = self.prompt_state(watch.prompt)  # read first, so that no page of an ended prompt is missed
        with self._lock:  # `note_prompts` reads the count
            while self._has_next(watch):
                watch.count += 1
            return watch.count, state

    def _has_next(self, watch: Watch) -> bool:
        return watch.count < len(watch.keys) and watch.keys[watch.count] in self._announced

    def prompt_state(self, key: bytes) -> PromptState:
        """Return the state of a prompt. If it has ended, no more of its pages will come."""
        with self._lock:
            if self._closed:
                return PromptState.ENDED
            if key in self._pending:
                return PromptState.PENDING
            ended_s = self._ended.get(key)
        if ended_s is None or time.monotonic() - ended_s > ENDED_S:
            return PromptState.UNKNOWN
        return PromptState.ENDED

    def pages(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the bytes of the leading pages that are here."""
        with self._lock:
            return [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        pages = self.pages([key])
        return bool(pages) and _spread(memoryview(pages[0]), parts)

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        page = b"".join(parts)
        with self._lock:
            self._num_bytes += len(page) - len(self._pages.pop(key, b""))
            self._pages[key] = page
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._pages)))

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= len(self._pages.pop(key, b""))
        self._announced.discard(key)

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._announced.clear()
            self._num_bytes = 0

    def close(self) -> None:
        if self._server is not None:
            self._local.pop(self._address, None)
            self._server.shutdown()
            self._server.server_close()
            self._server.close_connections()
        self.clear()
        with self._lock:
            self._closed = True
            watches = [*self._watches]
        for watch in watches:
            watch.wake()


def _spread(page: memoryview, parts: Sequence[memoryview]) -> bool:
    """Copy a page into consecutive buffers. Return False if the page's size differs from the size of all buffers."""
    if len(page) != sum(len(part) for part in parts):
        return False
    start = 0
    for part in parts:
        part[:] = page[start : start + len(part)]
        start += len(part)
    return True


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: OfferedPages, expected: bytes) -> None:
        self.pages = pages
        self.expected = expected
        self.strangers: dict[socket.socket, None] = {}  # connections that have not sent their greeting, oldest first
        self.connections: set[socket.socket] = set()
        self.num_keys: Counter[str] = Counter()  # host -> number of keys in its unanswered requests
        self.lock = threading.Lock()
        super().__init__(address, _Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a new thread.

        If there are too many connections, the oldest one without a greeting is closed. If all have sent their greeting,
        the new connection is refused.
        """
        with self.lock:
            if len(self.connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self.strangers), None)
                if oldest is None:
                    logger.warning("A connection to the bootstrap port was refused: %d are open.", MAX_CONNECTIONS)
                    super().shutdown_request(request)
                    return
                del self.strangers[oldest]
                _shut_down(oldest)
            self.connections.add(request)
            self.strangers[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.connections.discard(request)
            self.strangers.pop(request, None)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Close all connections, so that decode servers notice that the pages are not offered any more."""
        with self.lock:
            for connection in self.connections:
                _shut_down(connection)

    def greeted(self, request: socket.socket) -> None:
        """Record that a connection has sent a valid greeting: its peer is a decode server with the same model."""
        with self.lock:
            self.strangers.pop(request, None)

    @contextlib.contextmanager
    def counting(self, host: str, num_keys: int) -> Iterator[None]:
        """Count the keys of a request until it is answered. Raises ConnectionRefusedError if the host has too many."""
        with self.lock:
            if self.num_keys[host] + num_keys > MAX_HOST_KEYS:
                logger.warning("A request for KV pages was refused: %s has requested too many at once.", host)
                raise ConnectionRefusedError
            self.num_keys[host] += num_keys
        try:
            yield
        finally:
            with self.lock:
                self.num_keys[host] -= num_keys
                if not self.num_keys[host]:
                    del self.num_keys[host]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A decode server at %s left.", client_address, exc_info=True)


def _shut_down(connection: socket.socket) -> None:
    """Shut a connection down. The thread that serves it then ends, and closes the socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        """Answer the requests of a decode server. A connection that is too slow ends with TimeoutError."""
        pages, expected = self.server.pages, self.server.expected
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive(self.request, MAX_GREETING, REQUEST_S, end=b"\n") != expected:
            self._send(b"other pages\n")
            return
        self.server.greeted(self.request)
        self._send(b"ok %d\n" % pages.num_groups)
        while first := _receive(self.request, 1, IDLE_S):
            head = first + _receive(self.request, HEAD.size - 1, REQUEST_S)
            if len(head) < HEAD.size:
                return
            operation, count = HEAD.unpack(head)
            if operation not in (EXISTS, GET, WATCH) or count > MAX_KEYS:
                return
            with self.server.counting(self.client_address[0], count):
                self._answer(operation, _receive(self.request, count * KEY_BYTES, REQUEST_S), count)

    def _answer(self, operation: int, data: bytes, count: int) -> None:
        """Answer a request with `count` keys. Raises ConnectionResetError if `data` ends before the last key."""
        if len(data) < count * KEY_BYTES:
            raise ConnectionResetError
        pages = self.server.pages
        keys = [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]
        if operation == EXISTS:
            self._send(ANSWER.pack(pages.exists(keys)))
        elif operation == GET:
            found = pages.pages(keys)
            self._send(ANSWER.pack(len(found)))
            for page in found:
                self._send(page)
        elif keys:
            self._follow(pages, keys[0], keys[1:])

    def _follow(self, pages: OfferedPages, prompt: bytes, keys: Sequence[bytes]) -> None:
        """Answer a `WATCH` until all keys have a page or the prompt has ended."""
        changed = threading.Event()
        with pages.watching(prompt, keys, changed.set) as watch:
            while True:
                count, state = pages.progress(watch)
                self._send(PROGRESS.pack(count, state))
                if count == len(keys) or state == PromptState.ENDED:
                    return
                changed.wait(BEAT_S)
                changed.clear()

    def _send(self, answer: bytes) -> None:
        self.request.settimeout(SEND_S)
        self.request.sendall(answer)  # the timeout applies to the whole call


def _receive(connection: socket.socket, size: int, seconds: float, *, end: bytes | None = None) -> bytes:
    """Return `size` bytes. Return fewer if the connection ends, or if the data received so far ends with `end`.

    Raises TimeoutError if this takes longer than `seconds`.
    """
    data, end_s = bytearray(), time.monotonic() + seconds
    while len(data) < size and not (end is not None and data.endswith(end)):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(min(size - len(data), 1 << 16) if end is None else 1)
        if not part:
            break
        data += part
    return bytes(data)
