"""The time from the start of a server to its first token."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import IO

import anyio
import anyio.to_thread
import orjson

from bench.gpu.bench import FEW_TOKENS, SEED, Bench
from bench.gpu.figure import Figure
from runtime.errors import EngineFailure
from serve.bench.client import Client, ExchangeError

POLL_S = 0.01
STOP_S = 30.0
LAST_WORDS = 4000  # maximum characters of the server's log in an error


def cold(bench: Bench) -> list[Figure]:
    """Return the seconds from the start of a server's process to a client's first token, twice.

    In the first run no kernel is compiled. In the second run Triton finds the kernels of the first.
    """
    model = bench.model("llama-3.1-8b")
    words = [
        *("--model-path", bench.path(model), "--load-format", "dummy", "--dtype", model.dtype),
        *("--device", bench.device, "--random-seed", str(SEED), "--skip-server-warmup"),
        *(("--max-total-tokens", str(FEW_TOKENS)) if bench.tries_only(model) else ()),
        *bench.words,
    ]
    limit_s = bench.cost(model).held_bytes / bench.limits.bytes_per_s
    figures = []
    with TemporaryDirectory() as kernels:
        for what in ("nothing compiled before", "kernels compiled before"):
            took_s = anyio.run(partial(first_token, words, kernels, bench.sizes.cold_timeout_s))
            figures.append(
                Figure(
                    f"process start to first token, {what}",
                    model.name,
                    took_s,
                    "s",
                    limit_s,
                    "bytes of the weights",
                    lower_is_better=True,
                )
            )
    return figures


async def first_token(words: Sequence[str], kernels: str, timeout_s: float) -> float:
    """Return the seconds until a server with these options has generated a token.

    `kernels` is Triton's cache folder. Raises `EngineFailure` with the end of the server's log.
    """
    began_s = perf_counter()
    async with (
        running_server(words, {"TRITON_CACHE_DIR": kernels}) as (server, url),
        Client(url) as client,
    ):
        with anyio.move_on_after(timeout_s):
            while not await _gives_a_token(client):
                if server.poll() is not None:
                    raise EngineFailure("The server ended before its first token.")
                await anyio.sleep(POLL_S)
            return perf_counter() - began_s
        raise EngineFailure(f"No token came within {timeout_s:g} s.")


async def _gives_a_token(client: Client) -> bool:
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps({"input_ids": [5, 6, 7, 8], "sampling_params": sampling})
    try:
        response = await client.post("/generate", body)
    except ExchangeError:  # the server does not listen yet
        return False
    if response.status != 200:
        raise EngineFailure(f"The first request was answered with {response.status}.")
    return len(orjson.loads(response.body)["output_ids"]) == 1


@asynccontextmanager
async def running_server(words: Sequence[str], variables: Mapping[str, str] | None = None):
    """Run a server, and yield its process and address. Ends it afterwards; an error contains the end of its log."""
    port = _free_port()
    command = [sys.executable, "-m", "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
        try:
            yield server, f"http://127.0.0.1:{port}"
        except EngineFailure as failure:
            raise EngineFailure(f"{failure.message} {_last_words(log)}") from failure
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_stop, server)


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-LAST_WORDS:]


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
