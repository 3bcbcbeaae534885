"""Pages that a prefill server offers to decode servers over TCP.

Each rank of a prefill server keeps the pages of its prompts in memory (`OfferedPages`). The rank listens at the
bootstrap port plus its number. The same rank of a decode server (`PeerPages`) requests pages from the prefill servers
that the plan names. Both implement `PageStore`, so pages move as they do to and from files, with checksums.

With attention groups (--enable-dp-attention), each group of a prefill server has its own prompts. The ranks of a group
use the ports after those of the group before it. A rank of a decode server asks the rank with its number in each
group.

A connection begins with a greeting that names the space of the pages. A server therefore refuses a server with another
model or page layout. The answer to the greeting has the number of attention groups. After it, each request consists of
an operation and 32-byte keys:

EXISTS  answer: the number of leading keys that have a page
GET     answer: as EXISTS, and the bytes of these pages
WATCH   the first key is that of a prompt's last full page, and names the prompt. Answers: as EXISTS for the other keys,
        and the prompt's state. They are sent when they change and every `BEAT_S` seconds, until all keys have a page or
        the prompt has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import socketserver
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

from runtime.errors import ConfigurationError
from runtime.page_store.protocol import StoreSpace

logger = logging.getLogger("penstock.core")

EXISTS, GET, WATCH = 1, 2, 3
HEAD = struct.Struct("<BI")  # operation, number of keys
ANSWER = struct.Struct("<I")  # number of pages
PROGRESS = struct.Struct("<IB")  # number of pages, state of the prompt
KEY_BYTES = 32
MAX_KEYS = 1 << 16  # maximum number of keys in one request
TIMEOUT_S = 10.0
RETRY_S = 10.0  # if a prefill server does not answer in time, a decode server sends it no request for this long
MAX_GREETING = 512  # bytes
MAX_CONNECTIONS = 512  # maximum number of connections to one rank of a prefill server
REQUEST_S = 10.0  # seconds in which a decode server must send its greeting, or the rest of a request
SEND_S = 30.0  # seconds in which one answer must be sent
IDLE_S = 3600.0  # maximum number of seconds between two requests of a connection
DEFAULT_GB = 4.0  # memory for the offered pages of a rank, in 10^9 bytes
PAGES_AT_ONCE = 64  # maximum number of pages that a decode server requests at a time
BUFFERS_AT_ONCE = 128  # maximum number of buffers that one call of the operating system fills
BEAT_S = 1.0  # longest time between two answers to a `WATCH`, so that both sides notice a lost connection
MAX_ENDED = 4096  # maximum number of ended prompts that a prefill server remembers
ENDED_S = 5.0  # seconds for which a prefill server remembers an ended prompt
MAX_GROUPS = 1024  # maximum number of attention groups that a decode server believes a prefill server to have


class PromptState(IntEnum):
    """The state of a prompt on a prefill server."""

    UNKNOWN = 0  # the prompt has not arrived yet, or it ended more than `ENDED_S` ago
    PENDING = 1  # the prompt is queued or being computed, or its pages are not offered yet
    ENDED = 2  # the prompt has ended, so no more of its pages will come


OTHER_PAGES = "The prefill server %s:%d has another model, cache layout or number of ranks (%s)."


def greeting(space: StoreSpace) -> bytes:
    """Return the line that a decode server sends first on a connection."""
    return f"penstock-pages-4 {space.name} {space.rank}/{space.num_ranks}\n".encode()


@dataclass(slots=True, eq=False)
class Watch:
    """A reader that waits for the pages `keys` of a prompt."""

    prompt: bytes
    keys: Sequence[bytes]
    wake: Callable[[], None]  # called on any thread when more pages are there, or the prompt has begun or ended
    count: int = 0  # number of leading keys that had a page when the reader last looked


class OfferedPages:
    """The pages that one rank of a prefill server offers. If memory is short, the oldest are dropped. A `PageStore`."""

    # The open stores of this process, by address. Decode replicas read them without connections.
    in_process: ClassVar[WeakValueDictionary[tuple[str, int], OfferedPages]] = WeakValueDictionary()

    def __init__(self, space: StoreSpace, config: Mapping[str, Any]) -> None:
        """Start to listen at the rank's port. If `space.page_bytes` is 0 (a store only for lookups), do not listen.

        Raises `ConfigurationError` if the address cannot be used.
        """
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._max_bytes = int(float(config.get("max_gb", DEFAULT_GB)) * 10**9)
        self._num_bytes = 0
        self._pending: Counter[bytes] = Counter()  # last key of a prompt -> number of requests with this prompt
        self._ended: OrderedDict[bytes, float] = OrderedDict()  # last key of a prompt -> time at which it ended
        self._watches: set[Watch] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self.greeting = greeting(space)  # names the space of the pages
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
            self.in_process[address] = self
            threading.Thread(target=self._server.serve_forever, name="penstock-offer", daemon=True).start()

    def exists(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return next((number for number, key in enumerate(keys) if key not in self._pages), len(keys))

    def note_prompts(self, begun: Iterable[bytes], ended: Iterable[bytes]) -> None:
        """Record which prompts have arrived, and which have ended so that no more of their pages will come.

        A prompt is named by its last key, which occurs once for each request with this prompt. Also wakes the readers
        of pages that were stored since the last call.
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
            changed = [
                watch
                for watch in self._watches
                if watch.prompt in named or (watch.count < len(watch.keys) and watch.keys[watch.count] in self._pages)
            ]
        for watch in changed:
            watch.wake()

    @contextlib.contextmanager
    def watching(self, prompt: bytes, keys: Sequence[bytes], wake: Callable[[], None]) -> Iterator[Watch]:
        """Call `wake` inside the context, on any thread, when `progress` of the yielded watch changes."""
        watch = Watch(prompt, keys, wake)
        with self._lock:
            self._watches.add(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.discard(watch)

    def progress(self, watch: Watch) -> tuple[int, PromptState]:
        """Return how many of the leading keys of a watch have a page, and the state of its prompt."""
        state = self.prompt_state(watch.prompt)  # read first, so that no page of an ended prompt is missed
        with self._lock:  # `note_prompts` reads the count
            while watch.count < len(watch.keys) and watch.keys[watch.count] in self._pages:
                watch.count += 1
            return watch.count, state

    def prompt_state(self, key: bytes) -> PromptState:
        """Return the state of a prompt. If it has ended, all its pages that will ever come are here."""
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
            return list(takewhile(lambda page: page is not None, map(self._pages.get, keys)))  # type: ignore[arg-type]

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        pages = self.pages([key])
        return bool(pages) and _spread(memoryview(pages[0]), parts)

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        page = b"".join(parts)
        with self._lock:
            self._num_bytes += len(page) - len(self._pages.pop(key, b""))
            self._pages[key] = page
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._pages.popitem(last=False)[1])

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._num_bytes -= len(self._pages.pop(key, b""))

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._num_bytes = 0

    def close(self) -> None:
        if self._server is not None:
            self.in_process.pop(self._address, None)
            self._server.shutdown()
            self._server.server_close()
            self._server.close_connections()
        self.clear()
        with self._lock:
            self._closed = True
            watches = [*self._watches]
        for watch in watches:
            watch.wake()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: OfferedPages, expected: bytes) -> None:
        self.pages = pages
        self.expected = expected
        self.strangers: dict[socket.socket, None] = {}  # connections that have not sent their greeting, oldest first
        self.connections: set[socket.socket] = set()
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
        """Record that a connection has sent the right greeting, so its peer is a decode server of the same model."""
        with self.lock:
            self.strangers.pop(request, None)

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
            data = _receive(self.request, count * KEY_BYTES, REQUEST_S)
            if len(data) < count * KEY_BYTES:
                return
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


class PromptWatch:
    """The progress of one prompt on all prefill servers. Belongs to the event loop."""

    def __init__(self) -> None:
        self._progress: dict[object, tuple[int, PromptState]] = {}  # by connection or local store
        self._changed = asyncio.Event()
        self._following: list[_Following] = []
        self._local = contextlib.ExitStack()

    @property
    def progress(self) -> tuple[int, PromptState]:
        """How many of the leading keys have a page, and the prompt's state. ENDED if no server can be reached."""
        states = {state for _, state in self._progress.values()}
        count = max((count for count, _ in self._progress.values()), default=0)
        if PromptState.PENDING in states:
            return count, PromptState.PENDING
        return count, PromptState.UNKNOWN if states == {PromptState.UNKNOWN} else PromptState.ENDED

    async def wait(self) -> None:
        """Wait until the progress may have changed, or `BEAT_S` has passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), BEAT_S)
        self._changed.clear()
        for each in self._following:
            each.check()

    def wake(self) -> None:
        """Let `wait` return."""
        self._changed.set()

    def follow_local(self, offered: OfferedPages | None, prompt: bytes, keys: Sequence[bytes]) -> bool:
        """Follow the prompt on a replica in this process. Return False if there is no such replica."""
        if offered is None:
            return False
        loop = asyncio.get_running_loop()

        def look() -> None:
            self.note(offered, *offered.progress(watch))

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # raised if the loop is closed
                loop.call_soon_threadsafe(look)

        watch = self._local.enter_context(offered.watching(prompt, keys, wake))
        look()
        return True

    def follow(self, following: _Following) -> None:
        """Close this connection in `close`."""
        self._following.append(following)

    def note(self, source: object, count: int, state: PromptState) -> None:
        """Record the progress on a prefill server."""
        self._progress[source] = count, state
        self._changed.set()

    def lost(self, source: object) -> None:
        """Record that a prefill server cannot be reached any more."""
        self._progress.pop(source, None)
        self._changed.set()

    def close(self) -> None:
        """Stop following the prompt."""
        self._local.close()
        for each in self._following:
            each.transport.abort()


class _Following(asyncio.Protocol):
    """A connection on which a prefill server sends the progress of one prompt."""

    transport: asyncio.Transport

    def __init__(self, peer: tuple[str, int], watch: PromptWatch, request: bytes) -> None:
        self._peer, self._watch, self._request = peer, watch, request
        self._data = b""
        self._accepted = False
        self._heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._watch.follow(self)
        self._watch.note(self, 0, PromptState.UNKNOWN)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        self._data += data
        if not self._accepted:
            line, newline, rest = self._data.partition(b"\n")
            if (newline and _num_groups(line) is None) or len(line) > MAX_GREETING:
                logger.warning(OTHER_PAGES, *self._peer, line[:MAX_GREETING])
                self.transport.abort()
            if not newline:
                return
            self._accepted, self._data = True, rest
        whole = len(self._data) // PROGRESS.size * PROGRESS.size
        if self._accepted and whole and not self.transport.is_closing():
            count, state = PROGRESS.unpack(self._data[whole - PROGRESS.size : whole])
            self._watch.note(self, count, PromptState(state))
            self._data = self._data[whole:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.lost(self)

    def check(self) -> None:
        """Close the connection if the prefill server has been silent for too long."""
        if time.monotonic() - self._heard_s > TIMEOUT_S:
            self.transport.abort()


class PeerPages:
    """The pages of all prefill servers, for one rank of a decode server. A read-only `PageStore`."""

    def __init__(self, space: StoreSpace, config: Mapping[str, Any]) -> None:
        self._space = space
        # Addresses of this rank's counterparts. Those in further groups are added when a server names their number.
        self._peers = [(str(host), int(port) + space.rank) for host, port in config["peers"]]
        self._first_groups = frozenset(self._peers)
        self._greeted: set[tuple[str, int]] = set()  # peers that have answered to a greeting
        self._lock = threading.Lock()  # held during a request, so that requests run one at a time
        self._open: dict[tuple[str, int], socket.socket] = {}
        self._silent: dict[tuple[str, int], float] = {}  # peers that did not answer, and when to try them again
        self._last: tuple[str, int] | None = None  # the prefill server that supplied the last page
        # Whether a peer may be a replica in this process. The pages of such a peer are read without a connection.
        self._in_process = bool(config.get("in_process"))

    def exists(self, keys: Sequence[bytes]) -> int:
        best = 0
        for peer in self._peers:
            if (local := self._local(peer)) is not None:
                best = max(best, local.exists(keys))
                continue
            with self._using(peer):
                best = max(best, self._ask(peer, EXISTS, keys[:MAX_KEYS]))
        return best

    async def watch(self, prompt: bytes, keys: Sequence[bytes]) -> PromptWatch:
        """Follow the pages `keys` of a prompt on all prefill servers. The caller must close the result.

        `prompt` is the key of the prompt's last full page.
        """
        if any(self._local(peer) is None for peer in self._first_groups - self._greeted):
            # The number of attention groups of these servers is not known yet.
            await asyncio.to_thread(self.exists, [])
        watch = PromptWatch()
        request = greeting(self._space) + _request(WATCH, [prompt, *keys[: MAX_KEYS - 1]])
        try:
            remote = [peer for peer in self._peers if not watch.follow_local(self._local(peer), prompt, keys)]
            await asyncio.gather(*(self._follow(peer, watch, request) for peer in remote))
        except BaseException:
            watch.close()
            raise
        return watch

    async def _follow(self, peer: tuple[str, int], watch: PromptWatch, request: bytes) -> None:
        if time.monotonic() < self._silent.get(peer, 0.0):
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connect = asyncio.get_running_loop().create_connection
                await connect(lambda: _Following(peer, watch, request), *peer)
        except TimeoutError:
            self._silent[peer] = time.monotonic() + RETRY_S
        except OSError:
            return

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        return self.get_many([key], [parts]) == 1

    def get_many(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> int:
        """Read pages; `pages` has the buffers of each page. Return the number of leading pages that were read."""
        if any(sum(map(len, parts)) != self._space.page_bytes for parts in pages):
            return 0
        count = 0
        for peer in self._last_first():
            if (local := self._local(peer)) is not None:
                while count < len(keys) and local.get(keys[count], pages[count]):
                    count += 1
                continue
            with self._using(peer):
                before, count = count, self._read_pages(peer, keys, pages, count)
                if count > before:
                    self._last = peer
            if count == len(keys):
                break
        return count

    def _last_first(self) -> Iterator[tuple[str, int]]:
        """Yield the peers, with the one that supplied the last page first. Peers that are added meanwhile come last."""
        first = self._last
        if first is not None:
            yield first
        yield from (peer for peer in self._peers if peer != first)

    def _local(self, peer: tuple[str, int]) -> OfferedPages | None:
        """If the peer is a replica in this process, return its pages, which need no connection. Else return None."""
        offered = OfferedPages.in_process.get(peer) if self._in_process else None
        return offered if offered is not None and offered.greeting == greeting(self._space) else None

    def _read_pages(
        self, peer: tuple[str, int], keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]], first: int
    ) -> int:
        """Read pages from `peer`, from index `first` on. Return the index of the first page that it lacks."""
        for begin in range(first, len(keys), PAGES_AT_ONCE):
            asked = keys[begin : begin + PAGES_AT_ONCE]
            count = self._ask(peer, GET, asked)
            if count > len(asked):
                raise ConnectionResetError
            _fill(self._open[peer], [part for parts in pages[begin : begin + count] for part in parts])
            if count < len(asked):
                return begin + count
        return len(keys)

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        """Do nothing: a decode server does not offer pages."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the pages belong to the prefill servers."""

    def clear(self) -> None:
        """Do nothing, because the pages belong to the prefill servers."""

    def close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()
            self._open.clear()

    @contextlib.contextmanager
    def _using(self, peer: tuple[str, int]) -> Iterator[None]:
        """Yield the connection to a prefill server. An OSError in the block ends it and closes the connection."""
        with self._lock:
            try:
                yield
            except OSError as error:
                self._drop(peer)
                if not isinstance(error, ConnectionError):  # for example, a timeout
                    self._silent[peer] = time.monotonic() + RETRY_S

    def _drop(self, peer: tuple[str, int]) -> None:
        if (connection := self._open.pop(peer, None)) is not None:
            connection.close()

    def _ask(self, peer: tuple[str, int], operation: int, keys: Sequence[bytes]) -> int:
        """Send a request, and return the first number of its answer.

        If the prefill server has closed the connection since the last request, the request is sent again on a new one.
        """
        request = _request(operation, keys)
        if peer in self._open:
            try:
                return _exchange(self._open[peer], request)
            except ConnectionError:
                self._drop(peer)
        return _exchange(self._connection(peer), request)

    def _connection(self, peer: tuple[str, int]) -> socket.socket:
        if peer not in self._open:
            if time.monotonic() < self._silent.get(peer, 0.0):
                raise ConnectionRefusedError
            connection = socket.create_connection(peer, timeout=TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(greeting(self._space))
            answer = _line(connection)
            if (num_groups := _num_groups(answer)) is None:
                connection.close()
                logger.warning(OTHER_PAGES, *peer, answer)
                raise ConnectionRefusedError
            self._open[peer] = connection
            self._greeted.add(peer)
            if peer in self._first_groups:
                self._add_groups(peer, num_groups)
        return self._open[peer]

    def _add_groups(self, peer: tuple[str, int], num_groups: int) -> None:
        """Add this rank's counterparts in the further attention groups of a prefill server to the peers."""
        host, port = peer
        for group in range(1, num_groups):
            other = (host, port + group * self._space.num_ranks)
            if other not in self._peers:
                self._peers.append(other)


def _request(operation: int, keys: Sequence[bytes]) -> bytes:
    return HEAD.pack(operation, len(keys)) + b"".join(keys)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 64:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _num_groups(answer: bytes) -> int | None:
    """Return the number of attention groups in the answer to a greeting, or None if the server refused it."""
    word, _, number = answer.strip().partition(b" ")
    return int(number) if word == b"ok" and number.isdigit() and 0 < int(number) <= MAX_GROUPS else None


def _exchange(connection: socket.socket, request: bytes) -> int:
    """Send a request on a connection, and return the first number of the answer."""
    connection.sendall(request)
    answer = bytearray(ANSWER.size)
    _fill(connection, [memoryview(answer)])
    return ANSWER.unpack(answer)[0]


def _fill(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill the buffers from the connection, in order. Raises OSError if the connection ends first."""
    left = [buffer for buffer in buffers if len(buffer)]
    first = 0
    while first < len(left):
        count, *_ = connection.recvmsg_into(left[first : first + BUFFERS_AT_ONCE])
        if not count:
            raise ConnectionResetError
        while count and count >= len(left[first]):
            count -= len(left[first])
            first += 1
        if count:
            left[first] = left[first][count:]


def _spread(page: memoryview, parts: Sequence[memoryview]) -> bool:
    """Copy a page into consecutive buffers. Return False if the page's size differs from the size of all buffers."""
    if len(page) != sum(len(part) for part in parts):
        return False
    start = 0
    for part in parts:
        part[:] = page[start : start + len(part)]
        start += len(part)
    return True
