"""The server process: socket, engine and web application, from the start to a graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.config
import os
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.engine_core import EngineCore
from runtime.config import Args
from runtime.config.resolve.parallel import with_torchrun
from runtime.distributed.worker_group import run_node
from runtime.errors import ConfigurationError, EngineFailure
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.access import is_loopback, read_key_file
from serve.app import build_app
from serve.background import background_tasks
from serve.connection import Connection
from serve.demo import demo_path
from serve.engine import Engine

logger = logging.getLogger("penstock.server")

KEEP_ALIVE_S = 5
WARM_UP_TOKENS = 8
MAX_OPEN_FILES = 65536
GC_ALLOCATIONS = 20_000


def run(args: Args) -> int:
    """Serve until a signal; returns the exit status.

    The first SIGTERM or SIGINT refuses new connections and lets running requests finish: status 0. A second one
    ends them with an error: 128 + its number. An engine that fails ends the server: 1. Interrupted while it
    starts: 130. Raises `ConfigurationError` for what cannot be done here.
    """
    _configure_logging(args)
    args = with_torchrun(args, os.environ)
    _raise_file_limit()
    if args.parallel.node_rank > 0:
        return run_node(*prepare(args, Machine.probe(), demo_path=demo_path()))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_main(args))
        except KeyboardInterrupt:
            return 130


async def _main(args: Args) -> int:
    check_access(args)
    listening = bind(args.http.host, args.http.port)
    try:
        async with Engine.of(args) as engine:
            if not engine.core.plan.serve.skip_warmup:
                await warm_up(engine.core)
            calm_collector()
            return await _serve(engine, listening)
    finally:
        listening.close()


async def _serve(engine: Engine, listening: socket.socket) -> int:
    """Serve until a signal or the end of the engine; returns the exit status."""
    server = _Server(uvicorn_config(engine.core))
    work = (server.serve(sockets=[listening]), server.forced.wait(), engine.wait())
    async with background_tasks(*work) as (serving, forced, engine_ended):
        await asyncio.wait((serving, forced, engine_ended), return_when=asyncio.FIRST_COMPLETED)
        if engine_ended.done():
            error = None if engine_ended.cancelled() else engine_ended.exception()
            logger.critical("The engine failed; the server ends.", exc_info=error)
            server.should_exit = True
            await asyncio.wait((serving, forced), return_when=asyncio.FIRST_COMPLETED)
            return 1
        if serving.done():
            serving.result()
            return 0
        return 128 + server.last_signal


class _Server(uvicorn.Server):
    """Logs its address when it is ready. The first signal starts the shutdown, a second one sets `forced`.

    uvicorn raises the signals again after the shutdown, which would kill the process before its engine is closed
    and give a status other than 0; here it does not learn of them.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.forced = asyncio.Event()
        self.last_signal = 0
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.last_signal = sig
        if self.should_exit:
            self._loop.call_soon_threadsafe(self.forced.set)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            logger.info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
            logger.info("The server is fired up and ready to roll!")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before a model is loaded. Raises `ConfigurationError` if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"--host {host} is no address of this machine: {error.strerror}.") from error
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
    """Raises `ConfigurationError` for a file of keys that cannot be used, before a model is loaded."""
    http = args.http
    if http.api_key_file is not None:
        read_key_file(http.api_key_file)
    elif http.api_key is None and not is_loopback(http.host):
        logger.warning(
            "Everybody who reaches --host %s may use this server; set --api-key or --api-key-file.", http.host
        )


async def warm_up(core: EngineCore) -> None:
    """Generate a few tokens, so that the first request does not wait for work that is done once."""
    sampling = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=0, ignore_eos=True)
    prompt = (0,) * min(4, core.plan.model.context_length - WARM_UP_TOKENS)
    if not prompt:
        return
    [chunk] = await core.submit(Request(ids=prompt, sampling=sampling, label="WARM_UP")).whole()
    if len(chunk.ids) != WARM_UP_TOKENS:
        raise EngineFailure("The warm-up request ended early.")
    core.flush_cache()


def uvicorn_config(core: EngineCore) -> uvicorn.Config:
    """How uvicorn serves this core on the running event loop."""
    plan = core.plan.serve
    return uvicorn.Config(
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


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return None
    return uvloop.new_event_loop


def calm_collector() -> None:
    """Keep the garbage collector from walking all objects of torch while tokens stream.

    Objects alive now live as long as the process, so the collector stops tracking them. Requests make few
    reference cycles, so it runs every 20,000 allocations instead of every 700. Only for the server's process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)


def _configure_logging(args: Args) -> None:
    """Only for the server's process: an `Engine` leaves the configuration of logging to its user."""
    level = args.observe.log_level.upper()
    level_http = (args.observe.log_level_http or args.observe.log_level).upper()
    handlers: dict[str, Any] = {"handlers": ["stderr"], "propagate": False}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "[%(asctime)s] %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "stream": sys.stderr, "formatter": "line"}
            },
            "loggers": {
                "penstock": {"level": level, **handlers},
                "uvicorn": {"level": level_http, **handlers},
            },
        }
    )


def _raise_file_limit() -> None:
    """Each connection needs a file descriptor, and the usual limit is 1,024."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
