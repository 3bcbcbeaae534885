"""Batches: requests from a file of lines, as OpenAI's batch API writes them, and the answers in another file.

`penstock batch IN OUT` answers a file without a server. Every line goes through the application's own routes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal
from uuid import uuid4

import orjson

from runtime.config import Args
from runtime.errors import ConfigurationError, InvalidRequest
from serve.decode import Length, decode
from serve.endpoint import parse_object

if TYPE_CHECKING:
    import httpx

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate", "/encode")
BUSY = (429, 503)  # statuses of a server that asks to come again
MAX_LINE_BYTES = 64 * 1024 * 1024


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

    total: int = 0
    completed: int = 0  # answered with status 200
    failed: int = 0


async def answer_lines(
    client: httpx.AsyncClient,
    lines: Iterable[bytes],
    write: Callable[[bytes], object],
    counts: BatchCounts,
    *,
    num_at_once: int,
    url: str | None = None,
) -> None:
    """Answer every line that is not blank; `write` gets a line for each, in the order in which they are done.

    `client` sends to the application; with `url` all lines must be for that route. What is wrong with a line stands
    in its answer. A busy engine is asked again.
    """
    numbered = iter(enumerate(lines, start=1))

    async def work() -> None:
        for number, line in numbered:  # shared: each line goes to one worker
            if not line.strip():
                continue
            counts.total += 1
            answer = await _answer(client, number, line, url)
            is_good = answer["error"] is None and answer["response"]["status_code"] == 200
            counts.completed += is_good
            counts.failed += not is_good
            write(orjson.dumps(answer) + b"\n")

    async with asyncio.TaskGroup() as workers:
        for _ in range(num_at_once):
            workers.create_task(work())


async def _answer(client: httpx.AsyncClient, number: int, line: bytes, url: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": None,
    }
    try:
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"The line has more than {MAX_LINE_BYTES} bytes.")
        json = parse_object(line)
        if isinstance(json.get("custom_id"), str):
            made["custom_id"] = json["custom_id"][:512]
        asked = decode(BatchLine, json)
        if url is not None and asked.url != url:
            raise InvalidRequest(f"The batch is for {url}.", param="url")
        if asked.body.get("stream"):
            raise InvalidRequest("A line of a batch cannot be streamed.", param="body.stream")
    except InvalidRequest as error:
        code = "invalid_request"
        made["error"] = {"code": code, "message": f"Line {number}: {error.message}", "param": error.param}
        return made
    raw = orjson.dumps(asked.body)
    while True:
        response = await client.post(asked.url, content=raw, headers={"content-type": "application/json"})
        if response.status_code not in BUSY:
            break
        await asyncio.sleep(min(float(response.headers.get("retry-after", "1")), 10.0))
    made["response"] = {
        "status_code": response.status_code,
        "request_id": uuid4().hex,
        "body": orjson.loads(response.content),
    }
    return made


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
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    try:
        return stack.enter_context(Path(name).open(mode))  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be used: {error.strerror}.") from error


async def _run(args: Args, source: BinaryIO, target: BinaryIO, at_once: int | None) -> BatchCounts:
    import httpx

    from serve.app import build_app
    from serve.engine import Engine

    counts = BatchCounts()

    def write(line: bytes) -> None:
        target.write(line)
        target.flush()

    async with Engine.of(args) as engine:
        app = build_app(engine.core, {})
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {args.http.api_key}"} if args.http.api_key else {}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=None, headers=headers
        ) as client:
            num = at_once or engine.core.plan.scheduler.max_running
            await answer_lines(client, _lines(source), write, counts, num_at_once=max(1, num))
    return counts


def _lines(source: BinaryIO) -> Iterator[bytes]:
    while line := source.readline(MAX_LINE_BYTES + 1):
        yield line
