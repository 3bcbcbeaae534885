"""The server process: engine, application and socket, from start to the last answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.config
import os
import socket
import sys
from contextlib import suppress
from typing import Any

import uvicorn

from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.engine_core import EngineCore
from runtime.config import Args
from runtime.config.resolve.parallel import with_torchrun
from runtime.distributed.worker_group import run_node
from runtime.errors import ConfigurationError, EngineFailure
from runtime.request import Request, SamplingParams
from serve.app import build_app
from serve.connection import Connection
from serve.demo import demo_path
from serve.engine import Engine

logger = logging.getLogger("penstock.server")

KEEP_ALIVE_S = 5
WARM_UP_TOKENS = 8
MAX_OPEN_FILES = 65536
GC_ALLOCATIONS = 20_000


def run(args: Args) -> int:
    """Serve until a signal ends it; returns the exit status.

    SIGTERM and SIGINT let what runs finish; a second one ends it at once. Raises `ConfigurationError` for
    what cannot be done here.
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
    server = _Server(uvicorn_config(engine.core))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    engine_ended = asyncio.create_task(engine.wait())
    await asyncio.wait([serving, engine_ended], return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        logger.critical("The engine died; the server ends.")
        server.should_exit = True
        await serving
        return 1
    engine_ended.cancel()
    await asyncio.wait([engine_ended])
    await serving
    return 0


class _Server(uvicorn.Server):
    """Says when it is ready, and where."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            logger.info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
            logger.info("The server is fired up and ready to roll!")


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, taken before anything heavy happens.

    Raises `ConfigurationError` when that is not possible.
    """
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


async def warm_up(core: EngineCore) -> None:
    """Compute a few tokens, so that the first user does not pay for what happens only once."""
    sampling = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=0, ignore_eos=True)
    prompt = (0,) * min(4, core.plan.model.context_length - WARM_UP_TOKENS)
    if not prompt:
        return
    [chunk] = await core.submit(Request(ids=prompt, sampling=sampling, label="WARM_UP")).whole()
    if len(chunk.ids) != WARM_UP_TOKENS:
        raise EngineFailure("The warm-up request did not come back whole.")
    core.flush_cache()


def uvicorn_config(core: EngineCore) -> uvicorn.Config:
    """How uvicorn serves this core, on the loop that runs."""
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
    """Keep the garbage collector from walking all of torch while tokens stream.

    What is alive now stays for the life of the process, so it is taken out of the collector's sight; and
    requests make few cycles, so a sweep every 700 allocations finds nothing. For the server's process alone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)


def _configure_logging(args: Args) -> None:
    """For the server's process alone; used as a library, the engine leaves logging to its user."""
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
    """One descriptor per connection; the usual limit of 1,024 is reached quickly."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
