"""The KV pages that a decode server fetches from prefill servers.

Each rank of a decode server (`PeerPages`) requests pages from the prefill servers that the plan names (see
`transfer_protocol.py`). Pages of a replica in this process are read without a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from runtime.page_store.offered_pages import LocalPages, OfferedPages
from runtime.page_store.prompt_watch import OTHER_PAGES, TIMEOUT_S, PromptConnection, PromptWatch
from runtime.page_store.protocol import StoreSpace
from runtime.page_store.transfer_protocol import (
    ANSWER,
    EXISTS,
    GET,
    MAX_KEYS,
    WATCH,
    greeting,
    num_groups_in,
    pack_request,
)

logger = logging.getLogger("penstock.core")

RETRY_S = 10.0  # after a prefill server did not answer in time, it gets no requests for this long
PAGES_AT_ONCE = 64  # maximum number of pages in one request
BUFFERS_AT_ONCE = 128  # maximum number of buffers that one system call fills


class PeerPages:
    """The pages of all prefill servers, for one rank of a decode server. A read-only `PageStore`."""

    def __init__(self, space: StoreSpace, config: Mapping[str, Any], local: LocalPages | None = None) -> None:
        """Create the store. `local` are the pages of replicas in this process, which are read without a connection."""
        self._space = space
        # Addresses of the prefill ranks from which this rank fetches pages. At first, only ranks of first attention
        # groups are known. Ranks of further groups are added when a server reports its number of groups.
        self._peers = [(str(host), int(port) + space.rank) for host, port in config["peers"]]
        self._first_groups = frozenset(self._peers)
        self._adding = threading.Lock()  # held while further groups are added
        self._lock = threading.Lock()  # held during a request, so that requests run one at a time
        self._open: dict[tuple[str, int], socket.socket] = {}
        self._silent: dict[tuple[str, int], float] = {}  # peer that did not answer -> time of the next attempt
        self._last: tuple[str, int] | None = None  # the prefill server that supplied the last page
        self._local_pages = {} if local is None else local

    def exists(self, keys: Sequence[bytes]) -> int:
        best = 0
        for peer in self._peers:
            if (local := self._local(peer)) is not None:
                best = max(best, local.exists(keys))
                continue
            with self._using(peer):
                best = max(best, self._ask(peer, EXISTS, keys[:MAX_KEYS]))
        return best

    def watch(self, prompt: bytes, keys: Sequence[bytes]) -> PromptWatch:
        """Follow the pages `keys` of a prompt on all prefill servers. The caller must close the result.

        `prompt` is the key of the prompt's last full page. Must be called on the event loop. Does not wait for the
        servers.
        """
        watch, followed = PromptWatch(), set[tuple[str, int]]()
        request = greeting(self._space) + pack_request(WATCH, [prompt, *keys[: MAX_KEYS - 1]])

        def follow() -> None:
            for peer in self._peers:
                if peer not in followed:
                    followed.add(peer)
                    if not watch.follow_local(self._local(peer), prompt, keys):
                        watch.connect(self._connect(PromptConnection(peer, watch, request, partial(greeted, peer))))

        def greeted(peer: tuple[str, int], num_groups: int) -> None:
            self._note_groups(peer, num_groups)
            follow()

        follow()
        return watch

    async def _connect(self, connection: PromptConnection) -> None:
        peer = connection.peer
        if time.monotonic() < self._silent.get(peer, 0.0):
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: connection, *peer)
        except TimeoutError:
            self._silent[peer] = time.monotonic() + RETRY_S
        except OSError:
            return

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        return self.get_many([key], [parts]) == 1

    def get_many(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> int:
        """Read pages into `pages`, the buffers of each page. Return the number of leading pages that were read."""
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
        offered = self._local_pages.get(peer)
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
        """Hold the lock for requests to a prefill server. An OSError ends the block and closes the connection."""
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
        """Send a request, and return the number of pages in its answer.

        If the prefill server has closed the connection since the last request, the request is sent again on a new one.
        """
        request = pack_request(operation, keys)
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
            if (num_groups := num_groups_in(answer)) is None:
                connection.close()
                logger.warning(OTHER_PAGES, *peer, answer)
                raise ConnectionRefusedError
            self._open[peer] = connection
            self._note_groups(peer, num_groups)
        return self._open[peer]

    def _note_groups(self, peer: tuple[str, int], num_groups: int) -> None:
        """Add the ranks in the further attention groups of a prefill server from which this rank fetches pages."""
        if peer not in self._first_groups:
            return
        host, port = peer
        with self._adding:
            for group in range(1, num_groups):
                other = (host, port + group * self._space.num_ranks)
                if other not in self._peers:
                    self._peers.append(other)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 64:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _exchange(connection: socket.socket, request: bytes) -> int:
    """Send a request on a connection, and return the number of pages in the answer."""
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
