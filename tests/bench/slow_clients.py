"""`just slow-clients`: what well-behaved streams notice of slow clients (R10 of docs/reliability.md), and what the
event loop notices of long prompts, large bodies and large schemas (R11). The demo model in a real server's process; the
healthy clients are in this process, the others in one of their own, and an idle event loop in a third tells what the
machine itself adds.

Exit status 1 where R10 or R11 is not kept.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import socket
import statistics
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import httpx
import orjson

from bench import PROGRAM
from bench.raw_http import ask, request, status_of
from bench.soak import OPTIONS, quantile
from fake_core import FakeCore
from runtime.errors import RequestError
from serve.calls.body import parse_object
from serve.calls.chat_completions.schema import ChatBody
from serve.calls.decode import decode
from serve.native.generate import _read
from serve.server.process import SWITCH_S
from server_process import serving

HEALTHY = 4
SLOW_TOKENS, SLOW_TOP = 64, 20  # a megabyte of events for each slow reader, were each token told by itself
RECEIVE_BYTES = 4096  # of a slow reader's socket
BYTE_S = 1.0  # between two bytes of a slow sender, and between two reads
READ_BYTES = 512
PROBE_S = 0.05  # as the server's own probe
SETTLE_S = 300.0
LARGE_BYTES, MAX_BODY_BYTES = 10_000_000, 12_000_000
HOLD_TURNS = 5
MAX_LONGER, MAX_P99_S, MAX_LAG_S = 0.1, 0.005, 0.05
_BUCKET = re.compile(r'^penstock:event_loop_lag_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)
_SPAWN = multiprocessing.get_context("spawn")


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=f"{PROGRAM} slow", description=__doc__)
    parser.add_argument("--clients", type=int, default=500, help="slow readers, and senders (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of R10, in turns (default %(default)s)")
    parser.add_argument(
        "--only", choices=("R10", "R11", "holds"), help="one part; of R11 without a server (default: all)"
    )
    asked = parser.parse_args(argv)
    if asked.only != "R10":
        say_holds()
    if asked.only == "holds":
        return 0
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "log_level"]
    options += ["--enable-metrics", f"--max-body-bytes={MAX_BODY_BYTES}"]
    with serving(*options) as server, serving(*options) as other:
        port, elsewhere = (int(each.url.rsplit(":", 1)[1]) for each in (server, other))
        asyncio.run(ask(port, large_schema(), 60))  # the library of grammars is loaded
        asyncio.run(healthy(port, 1.0))
        slow = late = False
        if asked.only != "R11":
            slow = notice_slow_clients(port, elsewhere, asked.clients, asked.seconds, asked.rounds)
        if asked.only != "R10":
            late = notice_large_requests(port, asked.seconds)
        return int(slow or late)


def notice_slow_clients(port: int, elsewhere: int, count: int, seconds: float, rounds: int) -> bool:
    """R10 -> whether it is not kept. What slow clients take from the processors they take at another server too."""
    alone, beside_other, beside = [], [], []
    num_open = num_gaps = 0
    for _ in range(rounds):
        alone.append(quantile(asyncio.run(healthy(port, seconds)), 0.99))
        for at, found in ((elsewhere, beside_other), (port, beside)):
            with another(slow_clients, at, count) as told:
                num_open = told.get(timeout=SETTLE_S)
                wait_until_computed(at)  # what the slow readers asked for waits for them
                num_gaps += len(gaps := asyncio.run(healthy(port, seconds)))
                found.append(quantile(gaps, 0.99))
            wait_until_computed(at)
    before, other, after = map(statistics.median, (alone, beside_other, beside))
    each = " ".join("/".join(f"{p99 * 1e3:.1f}" for p99 in turn) for turn in zip(alone, beside_other, beside))
    print(
        f"R10 {num_open} slow clients; p99 between tokens of {HEALTHY} healthy streams, median of {rounds} rounds: "
        f"{before * 1e3:.1f} ms alone, {other * 1e3:.1f} ms with them at another server, {after * 1e3:.1f} ms with "
        f"them at the same one, {after / other - 1:+.0%} (each {each}; {num_gaps} gaps beside slow clients)",
        flush=True,
    )
    return after > (1 + MAX_LONGER) * other


def say_holds() -> None:
    """How long reading a large body keeps Python's lock from other threads: of R11 what other work on the machine and
    processors that are few do not change. The least of some turns, in processor time of the thread that reads.
    """
    core: Any = FakeCore(None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        for name, make in BODIES.items():
            head, raw = make().split(b"\r\n\r\n", 1)
            read = partial(_read_chat if b" /v1/chat" in head else _read, core, raw)
            longest_s, whole_s = min(held(read) for _ in range(HOLD_TURNS))
            print(
                f"R11 reading {name} keeps Python's lock for at most {longest_s * 1e3:.1f} ms at a time, of "
                f"{whole_s * 1e3:.0f} ms of processor time",
                flush=True,
            )
    finally:
        sys.setswitchinterval(before)


def _read_chat(core: Any, raw: bytes) -> ChatBody:
    return decode(ChatBody, parse_object(raw))


def held(work: Callable[[], object]) -> tuple[float, float]:
    """Processor time of a thread that does this: the most between two times that this thread had the lock, and all."""
    may_begin, done = threading.Event(), threading.Event()

    def run() -> None:
        may_begin.wait()
        with suppress(RequestError):
            work()
        done.set()
        time.sleep(PROBE_S)  # so that its clock is still there

    thread = threading.Thread(target=run)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    began_s = last_s = time.clock_gettime(clock)
    longest_s = 0.0
    may_begin.set()
    while not done.is_set():
        now_s = time.clock_gettime(clock)
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        time.sleep(0)
    thread.join()
    return longest_s, last_s - began_s


def notice_large_requests(port: int, seconds: float) -> bool:
    """R11 -> whether it is not kept."""
    late = False
    for name, large in LARGE.items():
        with another(large_requests, port, name) as told:
            statuses = {told.get(timeout=SETTLE_S)} if large is not None else set()
            with another(idle_lag, seconds) as idle:
                before = lag_counts(port)
                asyncio.run(healthy(port, seconds))
                lag = Lag.between(before, lag_counts(port))
                p99, longest = idle.get(timeout=SETTLE_S)
            statuses |= {told.get() for _ in range(told.qsize())}
        said = f"; answered {sorted(statuses, key=str)}" if large is not None else ""
        print(
            f"R11 loop lag with {name}: p99 at most {lag.p99_s * 1e3:g} ms, max at most {lag.longest_s * 1e3:g} ms "
            f"({lag.in_time:.2%} within {MAX_P99_S * 1e3:g} ms, {lag.count} looks); an idle loop beside it: "
            f"p99 {p99 * 1e3:.1f} ms, max {longest * 1e3:.1f} ms{said}",
            flush=True,
        )
        late = late or lag.p99_s > MAX_P99_S or lag.longest_s > MAX_LAG_S
    return late


class Lag(NamedTuple):
    """How late a server's event loop was, as its own histogram says."""

    count: int
    in_time: float  # the share within `MAX_P99_S`
    p99_s: float  # upper bounds
    longest_s: float

    @classmethod
    def between(cls, before: Mapping[float, float], after: Mapping[float, float]) -> Lag:
        counts = {bound: after[bound] - before.get(bound, 0) for bound in sorted(after)}
        total = counts[float("inf")]
        first = [next(bound for bound, count in counts.items() if count >= share * total) for share in (0.99, 1)]
        return cls(int(total), counts[MAX_P99_S] / total, *first)


def lag_counts(port: int) -> dict[float, float]:
    """How many looks were at most so late, by seconds."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


def wait_until_computed(port: int) -> None:
    """Until nothing is running and nothing waits."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        load = httpx.get(f"http://127.0.0.1:{port}/load", timeout=60).json()
        if not load["server_load"]:
            return
        time.sleep(0.1)
    raise TimeoutError("The server is not idle again.")


async def healthy(port: int, seconds: float) -> list[float]:
    """Seconds between two pieces of streams that are read at once, one after the other in a few places."""
    gaps: list[float] = []
    end = time.monotonic() + seconds

    async def read() -> None:
        body = {"text": "Once", "stream": True, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("POST", "/generate", orjson.dumps(body)))
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b'data: {"text"'):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    await asyncio.gather(*(read() for _ in range(HEALTHY)))
    return gaps


# --- in processes of their own ---


@contextmanager
def another(work: Callable[..., None], *values: Any) -> Iterator[Any]:
    """Do this in another process meanwhile; the queue that is its first argument."""
    told = _SPAWN.Queue()
    process = _SPAWN.Process(target=work, args=(told, *values), daemon=True)
    process.start()
    try:
        yield told
    finally:
        process.kill()
        process.join()


def slow_clients(told: Any, port: int, count: int) -> None:
    """`count` clients that read a little of their streams each second, and as many that send a byte. Tells how many."""
    asyncio.run(_slow_clients(told, port, count))


async def _slow_clients(told: Any, port: int, count: int) -> None:
    sampling = {"max_new_tokens": SLOW_TOKENS, "ignore_eos": True}
    body = {"text": "Once", "stream": True, "sampling_params": sampling, "return_logprob": True}
    whole = request("POST", "/generate", orjson.dumps({**body, "top_logprobs_num": SLOW_TOP}))
    served = 0
    everybody = asyncio.Event()

    async def send() -> None:
        """Byte by byte, until the server has had enough of it."""
        with await _connected(port) as sock:
            for i in range(len(whole)):
                await asyncio.get_running_loop().sock_sendall(sock, whole[i : i + 1])
                await _about(BYTE_S)

    async def read() -> None:
        """A stream, a little of it at a time. Where too many wait already, another time."""
        nonlocal served
        loop = asyncio.get_running_loop()
        with await _connected(port) as sock:
            await loop.sock_sendall(sock, whole)
            if b" 200 " not in await loop.sock_recv(sock, READ_BYTES):
                return
            served += 1
            if served >= count:
                everybody.set()
            while await loop.sock_recv(sock, READ_BYTES):
                await _about(BYTE_S)

    async def again_and_again(work: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(ConnectionError):
                await work()
            await _about(BYTE_S)

    async with asyncio.TaskGroup() as tasks:
        for work in [send, read] * count:
            tasks.create_task(again_and_again(work))
            await asyncio.sleep(BYTE_S / count)
        await everybody.wait()
        told.put(2 * count)


async def _connected(port: int) -> socket.socket:
    """With a small buffer, so that what is not read stays with the server."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    return made


async def _about(seconds: float) -> None:
    """So long on average; clients do not keep time with each other."""
    await asyncio.sleep(random.uniform(0.5, 1.5) * seconds)


def large_requests(told: Any, port: int, name: str) -> None:
    """The same large request again and again; tells the statuses."""
    large = LARGE[name]
    if large is not None:
        while True:
            told.put(status_of(asyncio.run(ask(port, large(), 30))))


def idle_lag(told: Any, seconds: float) -> None:
    """Tells the p99 and the maximum of the lag of a loop that does nothing else."""
    found: list[float] = []

    async def probe() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            found.append(time.perf_counter() - began - PROBE_S)

    asyncio.run(probe())
    told.put((quantile(found, 0.99), max(found)))


def long_prompt() -> bytes:
    body = {"text": "word " * 200_000, "sampling_params": {"max_new_tokens": 1}}
    return request("POST", "/generate", orjson.dumps(body))


def many_ids() -> bytes:
    """10 MB of token ids: more than the context takes."""
    body = b'{"input_ids": [' + b"12345, " * (LARGE_BYTES // 7) + b'1], "sampling_params": {"max_new_tokens": 1}}'
    return request("POST", "/generate", body)


def many_messages() -> bytes:
    """10 MB of a conversation in 4,096 messages."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 480} for i in range(4096)]
    return request("POST", "/v1/chat/completions", orjson.dumps({"messages": messages, "max_tokens": 1}))


def one_text() -> bytes:
    """10 MB of a prompt."""
    return request("POST", "/generate", orjson.dumps({"text": "word " * (LARGE_BYTES // 5)}))


def deep_fields() -> bytes:
    """10 MB of small objects, of which the route knows none."""
    body = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 1},
        "unknown": [{"a": [1, 2], "b": "c"}] * 420_000,
    }
    return request("POST", "/generate", orjson.dumps(body))


def large_schema() -> bytes:
    """A schema of about 60 KiB, another one each time it is made."""
    properties: dict[str, Any] = {
        f"field_with_its_long_name_{i}": {"type": "string", "maxLength": 20} for i in range(850)
    }
    properties[f"field_{time.monotonic_ns()}"] = True
    schema = orjson.dumps({"type": "object", "properties": properties}).decode()
    sampling = {"json_schema": schema, "max_new_tokens": 4}
    return request("POST", "/generate", orjson.dumps({"text": "Hi", "sampling_params": sampling}))


BODIES: Mapping[str, Callable[[], bytes]] = {
    "10 MB of token ids": many_ids,
    "10 MB of messages": many_messages,
    "10 MB of objects": deep_fields,
    "a text of 10 MB": one_text,
}
LARGE: Mapping[str, Callable[[], bytes] | None] = {
    "nothing else": None,
    "1 M-character prompts": long_prompt,
    **BODIES,
    "64 KiB schemas": large_schema,
}

if __name__ == "__main__":
    sys.exit(main())
