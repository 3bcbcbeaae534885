"""The server process: socket, engine and web application, from start to graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import uvicorn

from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.engine_core import EngineCore
from runtime.config import Args
from runtime.config.resolve.parallel import with_torchrun
from runtime.distributed.worker_group import run_node
from runtime.errors import NO_MEMORY_TO_START, ConfigurationError, EngineFailure, OutOfMemory
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.background import background_tasks
from serve.demo import demo_path
from serve.http.access import is_loopback, read_key_file
from serve.python.engine import Engine
from serve.server.app import build_app
from serve.server.connection import Connection
from serve.server.log_format import configure_logging
from serve.server.shutdown import Signals
from serve.server.tls import tls_context

logger = logging.getLogger("penstock.server")

KEEP_ALIVE_S = 75
LAST_STALL_S = 5.0  # seconds; during shutdown, a connection is closed if its client reads nothing for this long
FORCED_STALL_S = 0.3  # replaces LAST_STALL_S after a second signal
WARM_UP_TOKENS = 8
MAX_OPEN_FILES = 65536
SWITCH_S = 0.0002


def run(args: Args) -> int:
    """Serve until a signal, and return the exit status.

    After the first SIGTERM, SIGINT or SIGHUP, new requests are refused, running requests have `--shutdown-timeout`
    seconds to finish, and the status is 0. A second signal ends running requests with an error within a second, and the
    status is 128 + the signal's number. The status is the same for a signal during the start. If the engine fails, the
    status is 1. Raises `ConfigurationError` for options that cannot be satisfied on this machine.
    """
    configure_logging(args)
    args = with_torchrun(args, os.environ)
    _raise_file_limit()
    if args.parallel.node_rank > 0:
        return run_node(*prepare(args, Machine.probe(), demo_path=demo_path()))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_main(args))


async def _main(args: Args) -> int:
    signals = Signals()
    check_access(args)
    # Raises for an invalid file before the model is loaded.
    read_prompt(args.debug.debug_tensor_dump_input_file)
    with signals.caught(), bind(args.http.host, args.http.port) as listening:
        try:
            return await _start_and_serve(args, signals, listening)
        except asyncio.CancelledError:
            if not signals.requested.is_set():
                raise
            return 128 + signals.number


async def _start_and_serve(args: Args, signals: Signals, listening: socket.socket) -> int:
    async with Engine.of(args) as engine:
        if (prompt := read_prompt(engine.core.plan.serve.input_file)) is not None:
            sampling = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
            await engine.core.submit(Request(ids=prompt, sampling=sampling, label="INPUT_FILE")).whole()
            return 0
        if not engine.core.plan.serve.skip_warmup:
            await warm_up(engine.core)
        tune_interpreter()
        signals.started()
        return await _serve(engine, signals, listening)


async def _serve(engine: Engine, signals: Signals, listening: socket.socket) -> int:
    """Serve until a signal or the end of the engine, and return the exit status."""
    server = Server(uvicorn_config(engine.core), signals)
    work = (server.serve(sockets=[listening]), signals.requested.wait(), engine.wait())
    async with background_tasks(*work) as (serving, requested, engine_ended):
        await asyncio.wait((serving, requested, engine_ended), return_when=asyncio.FIRST_COMPLETED)
        if requested.done():
            server.close_idle()
            await _drain(engine.core, signals, engine_ended)
        if failed := engine_ended.done():
            error = None if engine_ended.cancelled() else engine_ended.exception()
            logger.critical("The engine failed; the server ends.", exc_info=error)
        # Requests that still run end here with an error, which is sent before the connections close.
        async with background_tasks(engine.aclose()) as (closing,):
            server.should_exit = True
            await serving
            await asyncio.wait((closing,))
    if failed:
        return 1
    return 128 + signals.number if signals.forced.is_set() else 0


async def _drain(core: EngineCore, signals: Signals, engine_ended: asyncio.Task[None]) -> None:
    """Refuse new requests, and wait for the running requests.

    Returns when all requests have ended, after the timeout (--shutdown-timeout), at a second signal, or when the engine
    ends.
    """
    timeout_s = core.plan.serve.shutdown_timeout_s
    logger.info(
        "Shutting down: new requests are refused; running ones have %g s to finish. A second signal ends them.",
        timeout_s,
    )
    async with background_tasks(core.drain(), signals.forced.wait()) as (drained, forced):
        work = (drained, forced, engine_ended)
        ended, _ = await asyncio.wait(work, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not ended:
        logger.warning("Ending the requests that did not finish within %g s.", timeout_s)


class Server(uvicorn.Server):
    """A uvicorn server that closes its connections in bounded time at the end.

    It logs its address when it is ready. `Signals` handles signals.
    """

    def __init__(self, config: uvicorn.Config, signals: Signals) -> None:
        super().__init__(config)
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            scheme = "http" if self.config.ssl is None else "https"
            logger.info("Listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
            logger.info("The server is fired up and ready to roll!")

    def close_idle(self) -> None:
        """Close connections without a complete request. The other connections close after their answer."""
        for connection in list(self._connections):
            connection.shutdown()

    @property
    def _connections(self) -> set[Connection]:
        return cast(set[Connection], self.server_state.connections)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections immediately.

        Other connections close when their clients have read the answers or stall.
        """
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        self.close_idle()
        connections, linger = self._connections, Linger()
        while connections:
            stall_s = FORCED_STALL_S if self._signals.forced.is_set() else LAST_STALL_S
            for connection in list(connections):
                if linger.stalled_for(connection) > stall_s:
                    connection.transport.abort()
            await asyncio.sleep(0.05)


class Linger:
    """Measures how long each client has read nothing of its answer."""

    def __init__(self) -> None:
        self._seen: dict[Connection, tuple[int, float]] = {}

    def stalled_for(self, connection: Connection) -> float:
        """Return for how many seconds the client has read nothing. Progress is seen only when this method is called."""
        unsent, now_s = connection.num_unsent_bytes, time.monotonic()
        before, since_s = self._seen.get(connection, (unsent + 1, now_s))
        if unsent < before:
            self._seen[connection] = (unsent, now_s)
            return 0.0
        return now_s - since_s


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. Raises `ConfigurationError` if this fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"--host {host} is not an address of this machine: {error.strerror}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"Port {port} of {host} cannot be used ({error.strerror}); choose another one with --port."
        ) from error
    return bound


def check_access(args: Args) -> None:
    """Raise `ConfigurationError` for invalid key and certificate files. Runs before a model is loaded."""
    http = args.http
    tls_context(http)
    if http.api_key_file is not None:
        known = {key.client.name for key in read_key_file(http.api_key_file)}
        if unknown := [name for name in args.schedule.api_key_weights if name not in known]:
            raise ConfigurationError(f"--api-key-weights: {http.api_key_file} has no key named {unknown[0]!r}.")
    elif http.api_key is None and not is_loopback(http.host):
        logger.warning(
            "Every client that can reach --host %s may use this server; set --api-key or --api-key-file.",
            http.host,
        )


def read_prompt(path: str | None) -> tuple[int, ...] | None:
    """Return the token ids in a NumPy file, or None without a path. Raises `ConfigurationError` for an invalid file."""
    if path is None:
        return None
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigurationError(f"--debug-tensor-dump-input-file {path} cannot be read: {error}.") from error
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or not ids.size:
        raise ConfigurationError(f"--debug-tensor-dump-input-file {path} must contain token ids in .npy format.")
    return tuple(ids.ravel().tolist())


async def warm_up(core: EngineCore) -> None:
    """Generate a few tokens, so that one-time work is done before the first request arrives.

    Raises `EngineFailure` if the engine cannot compute them.
    """
    num_new = 0 if core.plan.model.is_embedding else WARM_UP_TOKENS
    if core.plan.cache.role == "prefill":
        num_new = 1
    sampling = SamplingParams(max_new_tokens=num_new, temperature=0, ignore_eos=True)
    prompt = (0,) * min(4, core.plan.model.context_length - num_new)
    if not prompt:
        return
    request = Request(ids=prompt, sampling=sampling, wants_embedding=not num_new, label="WARM_UP")
    try:
        [chunk] = await core.submit(request).whole()
    except OutOfMemory as error:
        raise EngineFailure(NO_MEMORY_TO_START) from error
    if len(chunk.ids) != num_new:
        raise EngineFailure("The warm-up request ended early.")
    core.flush_cache()


def uvicorn_config(core: EngineCore) -> uvicorn.Config:
    """Return the uvicorn configuration that serves this core on the running event loop."""
    plan = core.plan.serve
    config = uvicorn.Config(
        build_app(core),
        loop="none",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=None,
        access_log=plan.log_level_http.lower() in ("debug", "info", "trace"),
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
    )
    config.load()
    config.ssl = tls_context(plan)
    return config


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # the module is not available on every platform
        return None
    return uvloop.new_event_loop


def tune_interpreter() -> None:
    """Prevent Python's own work from delaying tokens. Call it only in the server's process.

    The garbage collector stops tracking all objects that exist now, because they live as long as the process. This
    includes a few hundred unreachable objects, whose collection would take 0.1 s. The interpreter's switch interval is
    reduced from 5 ms to 0.2 ms: the event loop needs the GIL again after each system call, and another thread, for
    example one that decodes a body, then releases it sooner.
    """
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def _raise_file_limit() -> None:
    """Raise the limit on file descriptors. Each connection needs a descriptor, and the usual limit is 1,024."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
