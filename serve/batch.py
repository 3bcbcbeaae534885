"""Batches: requests from a file of lines, as OpenAI's batch API writes them, and the answers in another file.

`penstock batch IN OUT` answers a file without a server. Every line goes through the application's own routes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal
from uuid import uuid4

import orjson

from runtime.config import Args
from runtime.errors import ConfigurationError, EngineClosed, InvalidRequest, RequestError
from serve.background import background_tasks, run_in_daemon
from serve.decode import Length, decode
from serve.endpoint import INLINE_BYTES, max_body_bytes, off_loop, parse_object

if TYPE_CHECKING:
    import httpx

    from runtime.config.plan import Plan

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate", "/encode")
BUSY = (429, 503)  # statuses of a server that asks to come again
MAX_TRIES = 1000  # of a line, in two hours and a half
MAX_WAIT_S = 10.0  # between two of them
LINE_EXTRA_BYTES = 8192  # of a line, over the body of its request
FILE_BYTES = 1024**2  # of a file's lines that are read at once


@dataclass(slots=True, kw_only=True)
class BatchLine:
    """One request of a batch."""

    custom_id: Annotated[str, Length(1, 512)]
    url: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate", "/encode"
    ]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


@dataclass(slots=True)
class BatchCounts:
    """How far a batch is."""

    total: int = 0  # lines, where that is known
    completed: int = 0  # answered with status 200
    failed: int = 0


async def answer_lines(
    client: httpx.AsyncClient,
    lines: Iterable[bytes],
    write: Callable[[bytes, bool], object],
    counts: BatchCounts,
    *,
    num_at_once: int,
    max_line_bytes: int,
    url: str | None = None,
    ahead_bytes: int = 1,
) -> None:
    """Answer every line that is not blank, and write a line for each in the order in which they are done.

    `client` sends to the application; with `url` all lines must be for that route. `write` gets the line and whether
    the request succeeded; what is wrong with a line stands in its answer. A busy engine is asked again. Lines are read
    in threads, `ahead_bytes` of them at a time (and one at least): of a source whose next line may be long in coming,
    ask for one.
    """
    numbered = iter(enumerate(lines, start=1))
    turn = asyncio.Lock()
    ahead: deque[tuple[int, bytes]] = deque()

    async def following() -> tuple[int, bytes]:
        async with turn:  # each line goes to one worker
            if not ahead:
                # May be long in coming.
                ahead.extend(await run_in_daemon(partial(_some, numbered, ahead_bytes)))
            return ahead.popleft() if ahead else (0, b"")

    async def work() -> None:
        while (found := await following())[0]:
            number, line = found
            if not line.strip():
                continue
            read = partial(_read, number, line, url, max_line_bytes)
            asked, answer = await off_loop(read, small=len(line) <= INLINE_BYTES)
            is_good = answer["error"] is None
            if is_good:
                answer["response"], is_good = await _ask(client, *asked)
            counts.completed += is_good
            counts.failed += not is_good
            write(orjson.dumps(answer) + b"\n", is_good)

    async with asyncio.TaskGroup() as workers:
        for _ in range(num_at_once):
            workers.create_task(work())


def _some(numbered: Iterator[tuple[int, bytes]], num_bytes: int) -> list[tuple[int, bytes]]:
    """The next lines, until they have so many bytes; none at the end."""
    found: list[tuple[int, bytes]] = []
    for number, line in numbered:
        found.append((number, line))
        num_bytes -= len(line)
        if num_bytes <= 0:
            break
    return found


def _read(
    number: int, line: bytes, url: str | None, max_line_bytes: int
) -> tuple[tuple[str, bytes], dict[str, Any]]:
    """A line's route and body, and its answer so far, which has an `error` where the line is wrong."""
    answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        if len(line) > max_line_bytes:
            raise InvalidRequest(f"The line has more than {max_line_bytes} bytes (--max-body-bytes).")
        json = parse_object(line)
        if isinstance(json.get("custom_id"), str):
            answer["custom_id"] = json["custom_id"][:512]
        asked = decode(BatchLine, json)
        if url is not None and asked.url != url:
            raise InvalidRequest(f"The batch is for {url}.", param="url")
        if asked.body.get("stream"):
            raise InvalidRequest("A line of a batch cannot be streamed.", param="body.stream")
        return (asked.url, orjson.dumps(asked.body)), answer
    except RequestError as error:
        message = f"Line {number}: {error.message}"
        answer["error"] = {"code": "invalid_request", "message": message, "param": error.param}
        return ("", b""), answer


async def _ask(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[dict[str, Any], bool]:
    """The route's response as a batch's line has it, and whether it is an answer."""
    for num_tries in range(1, MAX_TRIES + 1):
        response = await client.post(url, content=body, headers={"content-type": "application/json"})
        if response.status_code not in BUSY or num_tries == MAX_TRIES:
            break
        wait_s = max(float(response.headers.get("retry-after", "1")), num_tries / 10)
        await asyncio.sleep(min(wait_s, MAX_WAIT_S))
    is_json = response.headers.get("content-type", "").startswith("application/json")
    made = {
        "status_code": response.status_code,
        "request_id": uuid4().hex,
        "body": orjson.Fragment(response.content) if is_json else response.text,  # JSON of ours has one line
    }
    return made, response.status_code == 200


def max_line_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """How long a line may be for a route."""
    return max_body_bytes(plan, takes_ids=takes_ids) + LINE_EXTRA_BYTES


def read_lines(source: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Its lines; of one that is longer, `max_bytes + 1` bytes."""
    while line := source.readline(max_bytes + 1):
        yield line
        while len(line) > max_bytes and not line.endswith(b"\n"):  # the rest of it
            line = source.readline(max_bytes + 1)


def main(words: Sequence[str]) -> int:
    """Follow the words after `batch`; returns 0 where every line was answered, else 1.

    Raises `ConfigurationError` for files that cannot be used, and what the engine raises.
    """
    parser = argparse.ArgumentParser(
        prog="penstock batch",
        description="Answer a file of requests without a server. Each line is an object with custom_id, url "
        f"({', '.join(URLS)}) and body, as OpenAI's batch API takes them; the answers have its form too. Every "
        "other option is the engine's: --model-path DIR ...",
    )
    parser.add_argument("input", metavar="IN", help="file of JSON lines; - for standard input")
    parser.add_argument("output", metavar="OUT", help="a file that is not there yet; - for standard output")
    parser.add_argument("--at-once", type=int, metavar="N", help="lines in work; default: as many as may run")
    options, rest = parser.parse_known_args(words)
    args = Args.parse(rest)
    with ExitStack() as stack:
        source, target = _opened(options.input, "rb", stack), _opened(options.output, "xb", stack)
        counts = asyncio.run(_run(args, source, target, options.at_once))
    sys.stderr.write(f"{counts.completed} answered, {counts.failed} failed: {options.output}\n")
    return 1 if counts.failed else 0


def _opened(name: str, mode: str, stack: ExitStack) -> BinaryIO:
    if name == "-":
        # A file of its own: a thread that still reads it when the process ends holds the lock of none of Python's.
        return sys.stdout.buffer if mode == "xb" else open(0, "rb", closefd=False)
    try:
        return stack.enter_context(Path(name).open(mode))  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be used: {error.strerror}.") from error


async def _run(args: Args, source: BinaryIO, target: BinaryIO, at_once: int | None) -> BatchCounts:
    import httpx

    from serve.app import build_app
    from serve.engine import Engine

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
            longest = max_line_bytes(plan, takes_ids=True)
            work = answer_lines(
                client,
                read_lines(source, longest),
                write,
                counts,
                num_at_once=max(1, at_once or plan.scheduler.max_running),
                max_line_bytes=longest,
                ahead_bytes=FILE_BYTES if stat.S_ISREG(os.fstat(source.fileno()).st_mode) else 1,
            )
            async with background_tasks(work, engine.wait()) as (answering, living):
                await asyncio.wait((answering, living), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    await living  # raises what ended the engine
                    raise EngineClosed("The engine ended before the batch.")
                await answering
    return counts
