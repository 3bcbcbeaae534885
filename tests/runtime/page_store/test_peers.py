"""The bootstrap port of a prefill server: strangers and slow connections hold nobody up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from runtime.page_store import offered_pages, peer_pages, prompt_watch, transfer_protocol
from runtime.page_store.offered_pages import OfferedPages
from runtime.page_store.peer_pages import PeerPages
from runtime.page_store.prompt_watch import PromptWatch
from runtime.page_store.protocol import StoreSpace
from runtime.page_store.transfer_protocol import EXISTS, HEAD, PromptState, greeting

SPACE = StoreSpace("model", 0, 1, 8)
KEY = b"k" * 32


def offered() -> tuple[int, OfferedPages]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    return number, OfferedPages(SPACE, {"host": "127.0.0.1", "port": number})


@pytest.fixture
def port() -> Iterator[int]:
    number, pages = offered()
    pages.set(KEY, [b"12345678"])
    yield number
    pages.close()


def fetched(port: int) -> bytes:
    buffer = bytearray(8)
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", port]]})
    try:
        assert store.exists([KEY, b"x" * 32]) == 1
        assert store.get(KEY, [memoryview(buffer)])
    finally:
        store.close()
    return bytes(buffer)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def welcomed(port: int) -> socket.socket:
    """Return a connection of a decode server, as soon as the server has noticed that earlier ones were closed."""
    while True:
        connection = connected(port)
        with suppress(OSError):
            connection.sendall(greeting(SPACE))
            if connection.recv(5) == b"ok 1\n":
                return connection
        connection.close()


def test_a_stranger_that_says_nothing_is_dropped_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "REQUEST_S", 0.05)
    with connected(port) as silent, connected(port) as slow:
        slow.sendall(b"p")
        assert silent.recv(1) == slow.recv(1) == b""
    monkeypatch.setattr(offered_pages, "REQUEST_S", 10.0)
    assert fetched(port) == b"12345678"


def test_a_request_that_does_not_end_is_dropped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(port) as half:
        half.sendall(greeting(SPACE))
        assert half.recv(5) == b"ok 1\n"
        monkeypatch.setattr(offered_pages, "REQUEST_S", 0.05)
        half.sendall(HEAD.pack(EXISTS, 5)[:3])
        assert half.recv(1) == b""


def test_other_pages_and_unknown_operations_end_the_connection(port: int) -> None:
    with connected(port) as other:
        other.sendall(b"GET / HTTP/1.1\r\n")
        assert other.recv(20) == b"other pages\n"
    for head in (HEAD.pack(9, 0), HEAD.pack(EXISTS, transfer_protocol.MAX_KEYS + 1)):
        with connected(port) as wrong:
            wrong.sendall(greeting(SPACE) + head)
            assert wrong.recv(5) == b"ok 1\n"
            assert wrong.recv(1) == b""


def test_strangers_make_room_and_decode_servers_do_not(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "MAX_CONNECTIONS", 3)
    with connected(port) as known:
        known.sendall(greeting(SPACE))
        assert known.recv(5) == b"ok 1\n"
        strangers = [connected(port) for _ in range(5)]
        assert fetched(port) == b"12345678"  # the oldest strangers have left
        assert strangers[0].recv(1) == b""
        known.sendall(HEAD.pack(EXISTS, 1) + KEY)
        assert known.recv(1)
        friends = [welcomed(port) for _ in range(2)]
        with connected(port) as refused:
            assert refused.recv(1) == b""
        for each in (*strangers, *friends):
            each.close()


def test_a_connection_that_the_server_closed_is_made_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "IDLE_S", 0.01)
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", port]]})
    assert store.exists([KEY]) == 1
    [connection] = store._open.values()
    assert connection.recv(1) == b""  # the server has closed it
    monkeypatch.setattr(offered_pages, "IDLE_S", 10.0)
    assert store.exists([KEY]) == 1
    store.close()


def test_many_pages_are_read_from_several_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pages, "PAGES_AT_ONCE", 3)
    keys, made = [bytes([number]) * 32 for number in range(10)], [offered(), offered()]
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", number] for number, _ in made]})
    try:
        for number, key in enumerate(keys[:9]):
            made[number // 5][1].set(key, [b"page%04d" % number])
        made[0][1].set(keys[7], [b"page0007"])  # after pages that this server lacks
        buffers = [bytearray(8) for _ in keys]
        assert store.get_many(keys, [[memoryview(each)[:3], memoryview(each)[3:]] for each in buffers]) == 9
        assert buffers == [b"page%04d" % number for number in range(9)] + [bytes(8)]
        made[1][1].close()
        assert store.get_many(keys, [[memoryview(each)] for each in buffers]) == 5
        assert store.get_many(keys[:1], [[memoryview(bytearray(7))]]) == 0, "a page has eight bytes"
        assert store.exists(keys) == 5, "the connection is still usable"
    finally:
        store.close()
        for _, pages in made:
            pages.close()


async def reached(watch: PromptWatch, count: int, state: PromptState) -> bool:
    """Wait until a watch has this progress. Fails if it takes more than a minute."""
    async with asyncio.timeout(60):
        while watch.progress != (count, state):
            await watch.wait()
    return True


@pytest.mark.parametrize("is_local", [False, True], ids=["over TCP", "in this process"])
async def test_pages_of_a_prompt_are_announced_once_they_are_offered(is_local: bool) -> None:
    """A reader is woken by the announcement, not by the beat, and learns of the prompt's end with the last pages."""
    prompt, keys, (number, pages) = b"p" * 32, [bytes([each]) * 32 for each in range(4)], offered()
    address = ("127.0.0.1", number)
    store = PeerPages(SPACE, {"peers": [[*address]]}, {address: pages} if is_local else None)
    watch = store.watch(prompt, keys)
    try:
        assert await reached(watch, 0, PromptState.UNKNOWN)
        pages.note_prompts([prompt, prompt], [])
        stored = (keys[0], keys[1], keys[3])
        for key in stored:
            pages.set(key, [b"12345678"])
        pages.note_prompts([b"q" * 32], [])
        with pages.watching(prompt, keys, lambda: None) as another:
            assert pages.progress(another) == (0, PromptState.PENDING), "other ranks may not have these pages yet"
        pages.note_prompts([], [], stored)
        assert await reached(watch, 2, PromptState.PENDING)
        pages.note_prompts([], [prompt])
        later = store.watch(prompt, keys[1:])
        assert await reached(later, 1, PromptState.PENDING), "a second request has the same prompt"
        pages.note_prompts([], [prompt])
        assert await reached(watch, 2, PromptState.ENDED)
        assert await reached(later, 1, PromptState.ENDED)
        later.close()
        again = store.watch(prompt, keys[3:])
        assert await reached(again, 1, PromptState.ENDED)
        again.close()
    finally:
        watch.close()
        store.close()
        pages.close()


def test_each_request_of_a_prompt_begins_and_ends_and_wakes_its_readers() -> None:
    """Requests with one prompt may begin, and end, in the same step."""
    prompt, pages = b"p" * 32, OfferedPages(SPACE._replace(page_bytes=0), {})
    states: list[PromptState] = []
    with pages.watching(prompt, [KEY], lambda: states.append(pages.prompt_state(prompt))):
        pages.note_prompts([prompt, prompt], [])
        pages.note_prompts([], [prompt, prompt])
    assert states == [PromptState.PENDING, PromptState.ENDED]


async def test_a_watch_ends_with_its_prefill_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "BEAT_S", 600.0)
    monkeypatch.setattr(prompt_watch, "BEAT_S", 600.0)
    prompt, (number, pages), (other, others) = b"p" * 32, offered(), offered()
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", port] for port in (number, other)]})
    watch = store.watch(prompt, [KEY])
    pages.note_prompts([prompt], [])
    try:
        assert await reached(watch, 0, PromptState.PENDING)
        pages.close()
        assert await reached(watch, 0, PromptState.UNKNOWN), "the other server may still get the prompt"
        others.close()
        assert await reached(watch, 0, PromptState.ENDED)
        late = store.watch(prompt, [KEY])
        assert await reached(late, 0, PromptState.ENDED), "no server can be reached"
        late.close()
    finally:
        watch.close()
        store.close()


async def test_a_silent_prefill_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_watch, "BEAT_S", 0.01)
    monkeypatch.setattr(prompt_watch, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = PeerPages(SPACE, {"peers": [["127.0.0.1", silent.getsockname()[1]]]})
        watch = store.watch(b"p" * 32, [KEY])
        assert watch.progress == (0, PromptState.UNKNOWN)
        assert await reached(watch, 0, PromptState.ENDED)
        watch.close()
        store.close()


async def test_a_watch_waits_for_no_server_and_finds_all_attention_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server never answers. The other one reports its second group in the answer to the watch."""
    prompt = b"p" * 32
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    spaces = [SPACE._replace(group=group, num_groups=2) for group in range(2)]
    groups = [OfferedPages(space, {"host": "127.0.0.1", "port": number}) for space in spaces]
    groups[1].note_prompts([prompt], [])
    monkeypatch.delattr(socket, "create_connection")  # blocks its caller
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = PeerPages(SPACE, {"peers": [["127.0.0.1", port] for port in (silent.getsockname()[1], number)]})
        for _ in range(2):
            watch = store.watch(prompt, [KEY])
            assert await reached(watch, 0, PromptState.PENDING)
            watch.close()
    store.close()
    for pages in groups:
        pages.close()


async def test_the_keys_that_a_host_watches_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "MAX_HOST_KEYS", 5)
    monkeypatch.setattr(offered_pages, "BEAT_S", 0.01)
    (number, pages), keys = offered(), [bytes([each]) * 32 for each in range(2)]
    pages.note_prompts([b"p" * 32], [])
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", number]]})
    try:
        first = store.watch(b"p" * 32, keys)
        assert await reached(first, 0, PromptState.PENDING)
        second = store.watch(b"p" * 32, keys)
        assert await reached(second, 0, PromptState.ENDED), "it has three more keys"
        first.close()
        server = pages._server
        assert server is not None
        async with asyncio.timeout(60):
            while server.num_keys:
                await asyncio.sleep(0.01)
        third = store.watch(b"p" * 32, keys)
        assert await reached(third, 0, PromptState.PENDING)
        for watch in (second, third):
            watch.close()
    finally:
        store.close()
        pages.close()


async def test_a_decode_server_that_leaves_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "BEAT_S", 0.01)
    number, pages = offered()
    store = PeerPages(SPACE, {"peers": [["127.0.0.1", number]]})
    watch = store.watch(b"p" * 32, [KEY])
    assert await reached(watch, 0, PromptState.UNKNOWN)
    pages.note_prompts([b"p" * 32], [])
    assert await reached(watch, 0, PromptState.PENDING)
    assert len(pages._watches) == 1
    watch.close()
    async with asyncio.timeout(60):
        while pages._watches:
            await asyncio.sleep(0.01)
    pages.close()
    store.close()


def test_requests_do_not_wait_in_turn_for_a_server_that_does_not_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = PeerPages(SPACE, {"peers": [["127.0.0.1", number] for number in (silent.getsockname()[1], port)]})
        connect, num_tries = socket.create_connection, [0]

        def counted(address: tuple[str, int], timeout: float) -> socket.socket:
            if address[1] == port:
                return connect(address, timeout=timeout)
            num_tries[0] += 1
            return connect(address, timeout=0.1)

        monkeypatch.setattr(socket, "create_connection", counted)
        for _ in range(5):
            assert store.exists([KEY]) == 1
        assert num_tries == [1]
        monkeypatch.setattr(peer_pages, "RETRY_S", 0.0)
        store._silent.clear()
        for _ in range(2):
            assert store.exists([KEY]) == 1
        assert num_tries == [3]
        store.close()
