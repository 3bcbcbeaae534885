"""`penstock router`: one address for prefill and decode servers.

A prompt goes to a prefill server, whose answer is one token that nobody reads. At the same time the whole request goes
to a decode server, which fetches the KV pages of the prompt when they are computed, and streams the output.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serve.background import background_tasks
from serve.http.access import PREFILLED

MAX_BODY_BYTES = 64 * 1024 * 1024
# Requests with prompts. All others go to a decode server alone.
GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses", "/api/chat")
)
HOP_HEADERS = frozenset(("host", "content-length", "connection", "transfer-encoding", "keep-alive", PREFILLED))
# Servers then do not take the requests of a router on their machine for local ones, for which admin routes need no key.
VIA = ("via", "1.1 penstock-router")
METHODS = ["GET", "POST", "PUT", "DELETE"]


def main(words: Sequence[str]) -> int:
    """Execute the words after `router`. Serves until a signal; returns 0."""
    parser = argparse.ArgumentParser(prog="penstock router", description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    options = parser.parse_args(words)
    app = router_app(options.prefill, options.decode)
    sys.stderr.write(f"Routing at http://{options.host}:{options.port}\n")
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


class Pool:
    """Servers of one role. The one with the fewest requests in progress is next."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._loads = {url.rstrip("/"): 0 for url in urls}
        self._turns = itertools.count()

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """Count a request of the chosen server while the context lasts."""
        turn = next(self._turns)
        urls = list(self._loads)
        url = min(urls[turn % len(urls) :] + urls[: turn % len(urls)], key=self._loads.__getitem__)
        self._loads[url] += 1
        try:
            yield url
        finally:
            self._loads[url] -= 1


class Router:
    """Forwards requests to pairs of servers."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], client: httpx.AsyncClient) -> None:
        self._prefill, self._decode, self._client = Pool(prefill), Pool(decode), client
        self._prefilling: set[asyncio.Task[None]] = set()

    async def handle(self, request: Request) -> Response:
        """Answer a request with the answer of a decode server."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _failure(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_HEADERS]
        path = request.scope["raw_path"].decode("latin-1") + (f"?{request.url.query}" if request.url.query else "")
        headers.append(VIA)
        if request.method == "POST" and request.url.path in GENERATING:
            task = asyncio.create_task(self._prefill_prompt(path, headers, bytes(body)))
            self._prefilling.add(task)
            task.add_done_callback(self._prefilling.discard)
            headers.append((PREFILLED, "1"))
        return await self._forward(request, path, headers, bytes(body))

    async def _prefill_prompt(self, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Let a prefill server compute the prompt. If it fails, the decode server computes the prompt itself."""
        try:
            fields = orjson.loads(body)
            if not isinstance(fields, dict):
                return
            fields |= {"stream": False}
            fields.pop("stream_options", None)
            async with self._prefill.server() as url:
                await self._client.post(url + path, headers=list(headers), content=orjson.dumps(fields))
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, httpx.HTTPError, httpx.InvalidURL) as error:
            sys.stderr.write(f"A prompt was not prefilled: {type(error).__name__}: {error}\n")

    async def _forward(self, request: Request, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> Response:
        """Send a request to a decode server. If the client leaves before the answer begins, the request ends."""
        server = self._decode.server()
        url = await server.__aenter__()
        answer = None
        try:
            sent = self._client.build_request(request.method, url + path, headers=list(headers), content=body)
            answer = await _unless_left(request, self._client.send(sent, stream=True))
        except httpx.HTTPError as error:
            return _failure(502, f"The decode server {url} cannot be reached: {type(error).__name__}.")
        except httpx.InvalidURL:
            return _failure(400, "The path is not valid.")
        finally:
            if answer is None:
                await server.__aexit__(None, None, None)
        if answer is None:
            return Response(status_code=499)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()
                await server.__aexit__(None, None, None)

        response = StreamingResponse(parts(), status_code=answer.status_code)
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"transfer-encoding"
        ]
        return response


def router_app(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """Return the application that routes to these servers."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0), limits=limits, trust_env=False
        ) as client:
            app.state.router = Router(prefill, decode, client)
            yield

    async def handle(request: Request) -> Response:
        return await request.app.state.router.handle(request)

    return Starlette(routes=[Route("/{path:path}", handle, methods=METHODS)], lifespan=lifespan)


async def _unless_left(request: Request, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response | None:
    """Return the answer; None if the client leaves first. The body has been read, so only its end can arrive."""

    async def leave() -> None:
        await request.receive()

    async with background_tasks(sending, leave()) as (answering, leaving):
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None


def _failure(status: int, message: str) -> Response:
    error = {"error": {"message": message, "type": "RouterError", "param": None, "code": None}}
    return Response(orjson.dumps(error), status_code=status, media_type="application/json")
