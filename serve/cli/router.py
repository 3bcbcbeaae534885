"""`penstock router`: one address for prefill and decode servers.

The router sends each prompt to a prefill server and ignores the single token of its answer. At the same time, it sends
the whole request to a decode server. The decode server fetches the KV pages of the prompt when they are computed, and
streams the output.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve.background import background_tasks
from serve.http.access import PREFILLED
from serve.http.errors import Failure
from serve.http.forwarding import MAX_BODY_BYTES, read_body
from serve.server.forwarded_errors import STREAMS, error_end, error_response

KIND = "RouterError"
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES  # limit on the bodies of all requests in progress
SMALL_BYTES = 2**20  # bodies up to this size are accepted even if large bodies fill the limit
BODY_S = 60.0  # time limit for a client to send its body, in seconds
ANSWER_S = 3600.0  # longest wait, in seconds, for the headers of an answer and for each further part
# Paths whose requests have prompts. Requests for other paths go only to a decode server.
GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses", "/api/chat")
)
HOP_HEADERS = frozenset(("host", "content-length", "connection", "transfer-encoding", "keep-alive", PREFILLED))
# A proxy header. It prevents servers on the router's machine from treating forwarded requests as local: local requests
# may call admin routes without a key.
VIA = ("via", "1.1 penstock-router")
METHODS = ["GET", "POST", "PUT", "DELETE"]


def main(words: Sequence[str]) -> int:
    """Run `penstock router` until a signal, and return 0. `words` are the arguments after `router`."""
    parser = argparse.ArgumentParser(prog="penstock router", description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--answer-timeout",
        type=float,
        default=ANSWER_S,
        metavar="SECONDS",
        help="longest wait for an answer to begin, and for its next part",
    )
    options = parser.parse_args(words)
    app = router_app(options.prefill, options.decode, answer_s=options.answer_timeout)
    sys.stderr.write(f"Routing at http://{options.host}:{options.port}\n")
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


class Pool:
    """The servers of one role (prefill or decode). Chooses the server with the fewest requests in progress."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._loads = {url.rstrip("/"): 0 for url in urls}
        self._turns = itertools.count()

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """Yield the URL of a server, and count a request for it until the context ends."""
        turn = next(self._turns)
        urls = list(self._loads)
        url = min(urls[turn % len(urls) :] + urls[: turn % len(urls)], key=self._loads.__getitem__)
        self._loads[url] += 1
        try:
            yield url
        finally:
            self._loads[url] -= 1


class _Bodies:
    """Counts the bytes in the bodies of all requests in progress."""

    num_bytes = 0


class _TooManyBytes(Exception):
    """Raised if the bodies of all requests in progress are too large together."""


class _Held:
    """Counts the bytes of one request's body, in `_Bodies` too, until all uses of the body have ended."""

    def __init__(self, bodies: _Bodies) -> None:
        self._num_bytes = self._num_uses = 0
        self._bodies = bodies

    def add(self, num_bytes: int) -> None:
        """Count further bytes. Raises `_TooManyBytes` if this body is large and all bodies together are too large."""
        is_full = self._bodies.num_bytes + num_bytes > MAX_BODIES_BYTES
        if is_full and self._num_bytes + num_bytes > SMALL_BYTES:
            raise _TooManyBytes
        self._num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the body as used until the context ends. After the last use, its bytes no longer count."""
        self._num_uses += 1
        try:
            yield
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._bodies.num_bytes -= self._num_bytes


class Router:
    """Forwards each request to a decode server, and requests with prompts also to a prefill server."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], client: httpx.AsyncClient) -> None:
        self._prefill, self._decode, self._client = Pool(prefill), Pool(decode), client
        self._prefilling: set[asyncio.Task[None]] = set()
        self._bodies = _Bodies()

    async def handle(self, request: Request) -> Response:
        """Answer a request with the answer of a decode server."""
        async with AsyncExitStack() as stack:
            held = _Held(self._bodies)
            stack.enter_context(held.used())
            try:
                async with asyncio.timeout(BODY_S):
                    body = await read_body(request, held.add)
            except TimeoutError:
                return _failure(request, 408, f"The body did not arrive within {BODY_S:g} seconds.")
            except _TooManyBytes:
                text = "Too many large bodies are in progress; retry later."
                return _failure(request, 503, text, {"retry-after": "1"})
            except ClientDisconnect:
                return Response(status_code=499)
            if body is None:
                return _failure(request, 413, f"The body has more than {MAX_BODY_BYTES} bytes.")
            return await self._route(request, body, held, stack)

    async def _route(self, request: Request, body: bytes, held: _Held, stack: AsyncExitStack) -> Response:
        """Forward a request. `stack` is closed when the answer is complete."""
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_HEADERS]
        path = request.scope["raw_path"].decode("latin-1") + (f"?{request.url.query}" if request.url.query else "")
        headers.append(VIA)
        if request.method == "POST" and request.url.path in GENERATING:
            use = ExitStack()
            use.enter_context(held.used())  # counted now, because the task may start only after the answer has ended
            task = asyncio.create_task(self._prefill_prompt(path, [*headers], body))
            self._prefilling.add(task)
            task.add_done_callback(self._prefilling.discard)
            task.add_done_callback(lambda _: use.close())
            headers.append((PREFILLED, "1"))
        return await self._forward(request, path, headers, body, stack)

    async def _prefill_prompt(self, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Let a prefill server compute the prompt. If it fails, the decode server computes the prompt itself."""
        try:
            async with self._prefill.server() as url:
                await self._client.post(url + path, headers=list(headers), content=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            sys.stderr.write(f"A prompt was not prefilled: {type(error).__name__}: {error}\n")

    async def _forward(
        self, request: Request, path: str, headers: Sequence[tuple[str, str]], body: bytes, stack: AsyncExitStack
    ) -> Response:
        """Send a request to a decode server, and return the answer as a stream.

        If the client disconnects before the answer begins, cancel the request.
        """
        url = await stack.enter_async_context(self._decode.server())
        try:
            sent = self._client.build_request(request.method, url + path, headers=list(headers), content=body)
            answer = await _unless_left(request, self._client.send(sent, stream=True))
        except httpx.TimeoutException:
            return _failure(request, 504, f"The decode server {url} did not answer in time.")
        except httpx.HTTPError as error:
            return _failure(request, 502, f"The decode server {url} cannot be reached: {type(error).__name__}.")
        except httpx.InvalidURL:
            return _failure(request, 400, "The path is not valid.")
        if answer is None:
            return Response(status_code=499)
        stack.push_async_callback(answer.aclose)
        response = _Forwarded(answer, request.url.path, url, stack.pop_all())
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"transfer-encoding"
        ]
        return response


class _Forwarded(StreamingResponse):
    """Streams the answer of a server. Closes `stack` when the answer is sent or the client has disconnected."""

    def __init__(self, answer: httpx.Response, path: str, url: str, stack: AsyncExitStack) -> None:
        super().__init__(_parts(answer, path, url), status_code=answer.status_code)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


def router_app(prefill: Sequence[str], decode: Sequence[str], *, answer_s: float = ANSWER_S) -> Starlette:
    """Return the application that routes to these servers.

    `answer_s` is the longest wait, in seconds, for the headers of an answer and for each further part.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(answer_s, connect=10.0), limits=limits, trust_env=False
        ) as client:
            app.state.router = Router(prefill, decode, client)
            yield

    async def handle(request: Request) -> Response:
        return await request.app.state.router.handle(request)

    return Starlette(routes=[Route("/{path:path}", handle, methods=METHODS)], lifespan=lifespan)


def _failure(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return error_response(request.url.path, Failure(status, KIND, message, headers=headers))


async def _parts(answer: httpx.Response, path: str, url: str) -> AsyncIterator[bytes]:
    """Yield the parts of the answer.

    If the decode server fails during a stream, the last part is an error in the format of the request's API. If it
    fails during another answer or a compressed stream, the connection's error is raised.
    """
    headers = answer.headers
    if not headers.get("content-type", "").startswith(STREAMS) or "content-encoding" in headers:
        async for part in answer.aiter_raw():
            yield part
        return
    line: list[bytes] = []  # the parts of an incomplete line, which is left out if an error follows
    last = b""  # the last complete lines with data
    try:
        async for part in answer.aiter_raw():
            lines, newline, rest = part.rpartition(b"\n")
            if newline:
                whole = b"".join((*line, lines, newline))
                if b"data:" in whole:
                    last = whole
                yield whole
                line = []
            if rest:
                line.append(rest)
    except httpx.HTTPError as error:
        message = f"The decode server {url} failed during the answer: {type(error).__name__}."
        yield error_end(path, Failure(502, KIND, message), last)
    else:
        yield b"".join(line)


async def _unless_left(request: Request, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response | None:
    """Return the answer, or None if the client disconnects first.

    The request's body has been read, so the next message from the client can only be its disconnect.
    """

    async def leave() -> None:
        await request.receive()

    async with background_tasks(sending, leave()) as (answering, leaving):
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
