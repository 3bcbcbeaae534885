"""`penstock batch IN OUT`: answer a file of requests without a server, with the routes of the web application."""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from runtime.config import Args
from runtime.errors import ConfigurationError, EngineClosed
from serve.background import background_tasks
from serve.calls.batch import FILE_BYTES, URLS, BatchCounts, answer_lines, max_line_bytes, read_lines


def main(words: Sequence[str]) -> int:
    """Run `penstock batch`, and return 0 if every line was answered, else 1. `words` are the arguments after `batch`.

    Raises `ConfigurationError` if a file cannot be opened, and the engine's errors.
    """
    parser = argparse.ArgumentParser(
        prog="penstock batch",
        description="Answer a file of requests without a server. Each line is an object with custom_id, url "
        f"({', '.join(URLS)}) and body, in the format of OpenAI's batch API; so are the answers. All other "
        "options are engine options: --model-path DIR ...",
    )
    parser.add_argument("input", metavar="IN", help="file of JSON lines; - for standard input")
    parser.add_argument("output", metavar="OUT", help="a new file; - for standard output")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="requests in progress at once; default: the engine's maximum"
    )
    options, rest = parser.parse_known_args(words)
    args = Args.parse(rest)
    with ExitStack() as stack:
        source, target = _opened(options.input, "rb", stack), _opened(options.output, "xb", stack)
        counts = asyncio.run(_run(args, source, target, options.at_once))
    sys.stderr.write(f"{counts.completed} answered, {counts.failed} failed: {options.output}\n")
    return 1 if counts.failed else 0


def _opened(name: str, mode: str, stack: ExitStack) -> BinaryIO:
    if name == "-":
        # A new file object, because a thread may still be reading at exit, and would hold the lock of sys.stdin.
        return sys.stdout.buffer if mode == "xb" else open(0, "rb", closefd=False)
    try:
        return stack.enter_context(Path(name).open(mode))  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise ConfigurationError(f"Cannot open {name}: {error.strerror}.") from error


async def _run(args: Args, source: BinaryIO, target: BinaryIO, at_once: int | None) -> BatchCounts:
    import httpx

    from serve.python.engine import Engine
    from serve.server.app import build_app

    counts = BatchCounts()

    def write(line: bytes, is_good: bool) -> None:
        target.write(line)
        target.flush()

    async with Engine.of(args) as engine:
        app = build_app(engine.core, {})
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {args.http.api_key}"} if args.http.api_key else {}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=None, headers=headers
        ) as client:
            plan = engine.core.plan
            max_bytes = max_line_bytes(plan, takes_ids=True)
            work = answer_lines(
                client,
                read_lines(source, max_bytes),
                write,
                counts,
                num_at_once=max(1, at_once or plan.scheduler.max_running),
                max_line_bytes=max_bytes,
                ahead_bytes=FILE_BYTES if stat.S_ISREG(os.fstat(source.fileno()).st_mode) else 1,
            )
            async with background_tasks(work, engine.wait()) as (answering, engine_end):
                await asyncio.wait((answering, engine_end), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    await engine_end  # raises the error that ended the engine
                    raise EngineClosed("The engine ended before the batch.")
                await answering
    return counts
