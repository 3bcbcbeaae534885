"""The server as a separate process, as users start, use and stop it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest

import fake_core
import greedy
import serve.server.process
import serve.server.shutdown
import tiny_models
from runtime.errors import EngineFailure, OutOfMemory
from serve.server.shutdown import Signals
from server_process import ROOT, Server, serving


@pytest.mark.slow
@pytest.mark.parametrize("family", greedy.FAMILIES)
def test_greedy_tokens_over_http_are_those_of_transformers(family: str):
    options = ("--skip-tokenizer-init", "--chunked-prefill-size", "16", "--page-size", "16")
    with serving("--model-path", greedy.model_path(family), *options) as server:
        body = {"input_ids": greedy.prompts(), "sampling_params": greedy.GREEDY}
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert [answer["output_ids"] for answer in answers] == greedy.reference(family)


STREAMS = 64


@pytest.mark.slow
def test_no_stream_is_lost_after_sigterm(tmp_path: Path):
    """R7 of docs/reliability.md with default options."""
    with serving("--model-path", tiny_models.cached(), TMPDIR=str(tmp_path)) as server:
        # Greedy: random text may contain separators at which httpx splits lines.
        sampling = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}
        body = {"text": "Once", "stream": True, "incremental": True, "sampling_params": sampling}
        begun = threading.Semaphore(0)

        def read() -> list[str]:
            with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
                lines = (line for line in response.iter_lines() if line)
                first = next(lines)
                begun.release()
                return [first, *lines]

        with ThreadPoolExecutor(STREAMS) as readers:
            asked = [readers.submit(read) for _ in range(STREAMS)]
            for _ in range(STREAMS):
                begun.acquire()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Shutting down")
            with contextlib.suppress(httpx.TransportError):  # the last stream may have ended
                assert httpx.post(f"{server.url}/generate", json=body).status_code == 503
            streams = [each.result() for each in asked]
        assert any('"finish_reason":null' in stream[-3] for stream in streams)
        for *pieces, last, done in streams:
            ids = [token for line in (*pieces, last) for token in orjson.loads(line[6:])["output_ids"]]
            assert len(ids) == 200
            assert '"finish_reason":{"type":"length","length":200}' in last
            assert done == "data: [DONE]"
        assert server.process.wait(timeout=30) == 0
        assert "Traceback" not in server.rest()
    assert list(tmp_path.iterdir()) == []


BLOCKED = """
import sys, time
from runtime.worker.model_runner import StepExecutor
from serve.__main__ import main
run, blocked = StepExecutor.run, []
def run_blocked(self, batch):
    if batch.sequences[0].request.label == "blocked" and batch.counts[0] == 1 and not blocked:
        blocked.append(time.sleep(8))
    return run(self, batch)
StepExecutor.run = run_blocked
sys.exit(main())
"""


@pytest.mark.slow
def test_a_forward_that_blocks_is_seen_while_it_blocks():
    """R6 of docs/reliability.md with default options: 503 after 5 s, then 200 again."""
    with serving("--model-path", tiny_models.cached(), program=("-c", BLOCKED)) as server:
        body = {
            "text": "Once",
            "rid": "blocked",
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        }
        with ThreadPoolExecutor(1) as other:
            began = time.monotonic()
            asked = other.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
            found: list[tuple[int, float]] = []
            while not asked.done():
                status = httpx.get(f"{server.url}/health").status_code
                found.append((status, time.monotonic() - began))
                time.sleep(0.05)
        first_s = next(seconds for status, seconds in found if status == 503)
        print(f"/health says 503 {first_s:.2f} s after the request, whose forward blocks for 8 s")
        assert {status for status, seconds in found if seconds < 5} == {200}
        assert asked.result().json()["meta_info"]["completion_tokens"] == 4
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_second_signal_ends_running_streams_with_an_error():
    with serving("--model-path", tiny_models.cached()) as server:
        body = {
            "text": "Once",
            "stream": True,
            "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 32},  # takes long
        }
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Shutting down")
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = lines
        assert orjson.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        assert server.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert "Traceback" not in server.rest()


@pytest.mark.slow
def test_signal_during_the_start_leaves_nothing_behind(tmp_path: Path):
    command = [sys.executable, "-m", "serve", "--port", "0", "--model-path", tiny_models.cached()]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        server = Server(process)
        server.wait_for("Load weight begin")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (0, 128 + signal.SIGTERM)  # it may have started already
        assert "Traceback" not in server.rest()
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("waits", [True, False])
def test_signal_while_kernels_compile_ends_the_compilers(waits: bool, tmp_path: Path):
    compiler, pid = tmp_path / "c++", tmp_path / "pid"
    compiler.write_text(f'#!/bin/sh\nsleep 60 & echo $! > "{pid}.new"; mv "{pid}.new" "{pid}"; wait\n')
    compiler.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "serve", "--port", "0", *(["--wait-for-kernels"] if waits else [])]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        for _ in range(6000):
            if pid.exists():
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in ({128 + signal.SIGTERM} if waits else {0, 128 + signal.SIGTERM})
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in (tmp_path / "cache" / "penstock" / "cpp").iterdir()] == ["lock"]


class FakeEngine:
    """A fake engine with the methods that the server's life cycle uses."""

    def __init__(self, **options: Any) -> None:
        self.core = fake_core.FakeCore(None, **options)
        self.closed = asyncio.Event()

    async def wait(self) -> None:
        await self.closed.wait()

    async def aclose(self) -> None:
        self.core.close()
        self.closed.set()


@dataclass
class Running:
    """A server in this process: its engine, signals, address and final status."""

    engine: FakeEngine
    signals: Signals
    address: tuple[str, int]
    status: asyncio.Task[int]

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent)
        return reader, writer

    async def ask(self, path: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return await self.connect(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    async def has(self, num_requests: int) -> None:
        async with asyncio.timeout(10):  # a refused request never arrives
            while self.engine.core.num_open != num_requests:
                await asyncio.sleep(0)


@asynccontextmanager
async def life(**options: Any) -> AsyncIterator[Running]:
    engine, signals = FakeEngine(held=True, **options), Signals()
    signals.started()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        status = asyncio.create_task(serve.server.process._serve(cast(Any, engine), signals, listening))
        try:
            while not (await reached(address)):
                await asyncio.sleep(0)
            yield Running(engine, signals, address, status)
        finally:
            status.cancel()
            await asyncio.wait([status])


async def reached(address: tuple[str, int]) -> bool:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return b" 200 " in answer


HALF_BODY = b"POST /generate HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\nab"
HALVES = (b"", b"POST /gen", HALF_BODY)


async def test_first_signal_closes_what_is_idle_and_refuses_what_is_new():
    async with life() as running:
        running_reader, _kept = await running.ask("/generate", input_ids=[5])
        await running.has(1)
        halves = [await running.connect(sent) for sent in HALVES]
        running.signals.arrived(signal.SIGTERM)
        while running.engine.core.state == "ready":
            await asyncio.sleep(0)
        reader, _ = await running.ask("/generate", input_ids=[5])
        refused = await reader.read()
        assert b" 503 " in refused
        assert b"retry-after: 5" in refused
        assert not running.status.done()
        while running.engine.core.num_open:
            running.engine.core.step()
        answer = await running_reader.read()  # the connection closes after it
        assert b" 200 " in answer
        assert [await reader.read() for reader, _ in halves] == [b"", b"", b""]
        assert await running.status == 0


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_hangup_is_a_first_signal_unless_it_is_ignored(ignored: bool):
    handlers = {number: signal.getsignal(number) for number in serve.server.shutdown.NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        signals = Signals()
        signals.started()
        with signals.caught():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            assert signals.requested.is_set() is not ignored
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def test_what_does_not_finish_in_time_ends_with_an_error_and_status_0():
    async with life(shutdown_timeout_s=0.05) as running:
        reader, _ = await running.ask("/generate", input_ids=[5], stream=True)
        await running.has(1)
        running.engine.core.step()
        await reader.readuntil(b"data: ")
        running.signals.arrived(signal.SIGTERM)
        rest = await reader.read()
        assert b'data: {"error":' in rest
        assert b'"code":503' in rest
        assert b"data: [DONE]" in rest
        assert await running.status == 0


async def test_second_signal_ends_streams_with_an_error(monkeypatch: pytest.MonkeyPatch):
    armed: list[tuple[float, int]] = []
    monkeypatch.setattr(serve.server.shutdown, "exit_after", lambda *given: armed.append(given))
    async with life() as running:
        reader, _ = await running.ask("/generate", input_ids=[5], stream=True)
        await running.has(1)
        running.engine.core.step()
        await reader.readuntil(b"data: ")
        running.signals.arrived(signal.SIGTERM)
        while running.engine.core.state == "ready":
            await asyncio.sleep(0)
        running.signals.arrived(signal.SIGINT)
        rest = await reader.read()
        assert b'"code":503' in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert await running.status == 128 + signal.SIGINT
    assert armed == [(serve.server.shutdown.FORCED_S, 128 + signal.SIGINT)]


async def test_stalled_reader_holds_the_end_for_a_moment_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve.server.process, "LAST_STALL_S", 0.05)
    async with life(text="x") as running:
        core = running.engine.core
        core._ids_of = lambda request, index: [7] * 30_000
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, running.address)
            raw = orjson.dumps({"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 30_000}})
            head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n"
            head += "content-type: application/json\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(client, head.encode() + raw)
            await running.has(1)
            for number in range(30_000):
                core.step()
                if number % 100 == 0:
                    await asyncio.sleep(0)
            running.signals.arrived(signal.SIGTERM)
            assert await running.status == 0


async def test_failure_of_the_engine_ends_the_server_and_is_logged_once(caplog: pytest.LogCaptureFixture):
    class Failing(FakeEngine):
        async def wait(self) -> None:
            raise EngineFailure("An actor of the engine died.")

    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert await serve.server.process._serve(cast(Any, Failing()), Signals(), listening) == 1
    gc.collect()  # a task reports its error when it is deleted
    assert reports == []
    assert caplog.text.count("EngineFailure: An actor of the engine died.") == 1


def refusal(*options: str) -> str:
    command = [sys.executable, "-m", "serve", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


async def test_a_warm_up_without_enough_memory_says_what_to_lower() -> None:
    engine = FakeEngine(held=True)
    warming = asyncio.create_task(serve.server.process.warm_up(cast(Any, engine.core)))
    while not engine.core.num_open:
        await asyncio.sleep(0)
    engine.core._requests.fail_all(OutOfMemory("This request, the newest one, was ended."))
    with pytest.raises(EngineFailure, match="Lower --mem-fraction-static or --max-total-tokens"):
        await warming


def test_taken_port_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Port {port}" in refusal("--port", port, "--model-path", "/nowhere")


def test_directory_that_is_no_model_is_refused_without_a_traceback(tmp_path: Path):
    assert "config.json" in refusal("--port", "0", "--model-path", str(tmp_path))
