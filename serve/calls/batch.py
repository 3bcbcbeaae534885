"""Answer batch files of OpenAI's format: one request per line of the input, one answer per line of the output.

Every line goes through the application's own routes. `/v1/batches` and `penstock batch` both answer files this way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal
from uuid import uuid4

import orjson

from runtime.errors import InvalidRequest, RequestError
from serve.background import run_in_daemon
from serve.calls.body import INLINE_BYTES, max_body_bytes, off_loop, parse_object
from serve.calls.decode import Length, decode

if TYPE_CHECKING:
    import httpx

    from runtime.config.plan import Plan

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate", "/encode")
BUSY = (429, 503)  # statuses that ask the client to retry
MAX_TRIES = 1000  # tries per line; together they take about two and a half hours
MAX_WAIT_S = 10.0  # maximum wait between two tries
LINE_EXTRA_BYTES = 8192  # maximum size of a line's other fields, in addition to its request's body
FILE_BYTES = 1024**2  # number of bytes of a file that are read at a time


@dataclass(slots=True, kw_only=True)
class BatchLine:
    """One request of a batch."""

    custom_id: Annotated[str, Length(1, 512)]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate", "/encode"]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


@dataclass(slots=True)
class BatchCounts:
    """Progress of a batch."""

    total: int = 0  # number of lines; 0 while it is not known
    completed: int = 0  # lines answered with status 200
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
    """Answer every line that is not blank, and write the answers in the order of completion.

    `client` sends requests to the application. If `url` is set, a line for another route is invalid. An invalid line
    gets an error as its answer. If the engine is busy, the request is sent again after a wait. `write(line, is_good)`
    is called once per answer: `line` is the answer as one line of JSON, and `is_good` tells whether the request
    succeeded.

    A thread reads lines in advance until they have `ahead_bytes` in total, at least one line. Pass 1 for a slow source,
    so that each line is answered as soon as it has been read.
    """
    numbered_lines = iter(enumerate(lines, start=1))
    turn = asyncio.Lock()
    ahead: deque[tuple[int, bytes]] = deque()

    async def next_line() -> tuple[int, bytes]:
        async with turn:  # one worker at a time reads lines
            if not ahead:
                # In a thread, because the source may take long to deliver its next line.
                ahead.extend(await run_in_daemon(partial(_next_lines, numbered_lines, ahead_bytes)))
            return ahead.popleft() if ahead else (0, b"")

    async def work() -> None:
        while (numbered_line := await next_line())[0]:
            number, line = numbered_line
            if not line.strip():
                continue
            read = partial(_read, number, line, url, max_line_bytes)
            request, answer = await off_loop(read, small=len(line) <= INLINE_BYTES)
            is_good = answer["error"] is None
            if is_good:
                answer["response"], is_good = await _ask(client, *request)
            counts.completed += is_good
            counts.failed += not is_good
            write(orjson.dumps(answer) + b"\n", is_good)

    async with asyncio.TaskGroup() as workers:
        for _ in range(num_at_once):
            workers.create_task(work())


def _next_lines(numbered: Iterator[tuple[int, bytes]], num_bytes: int) -> list[tuple[int, bytes]]:
    """Return the next lines, about `num_bytes` in total. The list is empty if no lines are left."""
    chunk: list[tuple[int, bytes]] = []
    for number, line in numbered:
        chunk.append((number, line))
        num_bytes -= len(line)
        if num_bytes <= 0:
            break
    return chunk


def _read(number: int, line: bytes, url: str | None, max_line_bytes: int) -> tuple[tuple[str, bytes], dict[str, Any]]:
    """Return (route, body) of a line's request, and the answer before its `response` is known.

    If the line is invalid, the answer has an `error`, and route and body are empty.
    """
    answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        if len(line) > max_line_bytes:
            raise InvalidRequest(f"The line has more than {max_line_bytes} bytes (--max-body-bytes).")
        json = parse_object(line)
        if isinstance(json.get("custom_id"), str):
            answer["custom_id"] = json["custom_id"][:512]
        request = decode(BatchLine, json)
        if url is not None and request.url != url:
            raise InvalidRequest(f"The batch is for {url}.", param="url")
        if request.body.get("stream"):
            raise InvalidRequest("A line of a batch cannot be streamed.", param="body.stream")
        return (request.url, orjson.dumps(request.body)), answer
    except RequestError as error:
        message = f"Line {number}: {error.message}"
        answer["error"] = {"code": "invalid_request", "message": message, "param": error.param}
        return ("", b""), answer


async def _ask(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[dict[str, Any], bool]:
    """Send a request. Return (response in the format of a batch line, whether the request succeeded).

    Waits and sends the request again while the server is busy.
    """
    for num_tries in range(1, MAX_TRIES + 1):
        response = await client.post(url, content=body, headers={"content-type": "application/json"})
        if response.status_code not in BUSY or num_tries == MAX_TRIES:
            break
        wait_s = max(float(response.headers.get("retry-after", "1")), num_tries / 10)
        await asyncio.sleep(min(wait_s, MAX_WAIT_S))
    is_json = response.headers.get("content-type", "").startswith("application/json")
    answer = {
        "status_code": response.status_code,
        "request_id": uuid4().hex,
        # JSON is copied without parsing, because the application writes it without line breaks.
        "body": orjson.Fragment(response.content) if is_json else response.text,
    }
    return answer, response.status_code == 200


def max_line_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """Return the maximum length in bytes of a batch line. `takes_ids`: whether its route accepts token ids."""
    return max_body_bytes(plan, takes_ids=takes_ids) + LINE_EXTRA_BYTES


def read_lines(source: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `source`; a line longer than `max_bytes` is cut to `max_bytes + 1` bytes."""
    while line := source.readline(max_bytes + 1):
        yield line
        while len(line) > max_bytes and not line.endswith(b"\n"):  # skip the rest of the line
            line = source.readline(max_bytes + 1)
