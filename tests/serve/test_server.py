"""The server as a process of its own: what a user starts, asks and stops."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, cast

import httpx
import orjson
import pytest

import fake_core
import greedy
import serve.server
import tiny_models
from runtime.errors import EngineFailure

ROOT = Path(__file__).parents[2]


class Server:
    """`python -m serve` on a free port; `log` fills while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._lines: Queue[str | None] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """The next log line with `text`; fails when the process ends first."""
        while (line := self._lines.get(timeout=60)) is not None:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError("the server ended:\n" + "".join(self.log))

    def rest(self) -> str:
        while (line := self._lines.get(timeout=60)) is not None:
            self.log.append(line)
        return "".join(self.log)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    server = Server(process)
    try:
        line = server.wait_for("Listening on")
        server.url = re.search(r"http://\S+", line)[0]  # pyright: ignore[reportOptionalSubscript]
        server.wait_for("ready to roll")
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("family", greedy.FAMILIES)
def test_greedy_tokens_over_http_are_those_of_transformers(family: str):
    options = ("--skip-tokenizer-init", "--chunked-prefill-size", "16", "--page-size", "16")
    with serving("--model-path", greedy.model_path(family), *options) as server:
        body = {"input_ids": greedy.prompts(), "sampling_params": greedy.GREEDY}
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert [answer["output_ids"] for answer in answers] == greedy.reference(family)


@pytest.mark.slow
def test_running_stream_ends_whole_after_sigterm():
    with serving("--model-path", tiny_models.cached()) as server:
        body = {
            "text": "Once",
            "stream": True,
            "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
        }
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert '"finish_reason":null' in first
        assert '"length":500' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(timeout=30) == 0
        assert "Traceback" not in server.rest()


@pytest.mark.slow
def test_second_signal_ends_running_streams_with_an_error():
    with serving("--model-path", tiny_models.cached()) as server:
        body = {
            "text": "Once",
            "stream": True,
            "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 128},  # takes long
        }
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Waiting for connections to close")
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = lines
        assert orjson.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        assert server.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert "Traceback" not in server.rest()


async def test_failure_of_the_engine_ends_the_server_and_is_logged_once(caplog: pytest.LogCaptureFixture):
    class Failing:
        core = fake_core.FakeCore(None)

        async def wait(self) -> None:
            raise EngineFailure("An actor of the engine died.")

    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert await serve.server._serve(cast(Any, Failing()), listening) == 1
    gc.collect()  # a task reports when it is deleted
    assert reports == []
    assert caplog.text.count("EngineFailure: An actor of the engine died.") == 1


def refusal(*options: str) -> str:
    command = [sys.executable, "-m", "serve", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_taken_port_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Port {port}" in refusal("--port", port, "--model-path", "/nowhere")


def test_directory_that_is_no_model_is_refused_without_a_traceback(tmp_path: Path):
    assert "config.json" in refusal("--port", "0", "--model-path", str(tmp_path))
