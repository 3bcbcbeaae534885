"""Code common to all routes: read the body, wait for the output, and convert errors to responses."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import uuid4

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.actors.output_stream import OutputStream, close_all, read_all
from runtime.errors import (
    ContextOverflow,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    TooManyRequests,
)
from runtime.request import Chunk, Request
from serve.background import background_tasks
from serve.calls.body import INLINE_BYTES, TURN_BYTES, off_loop, parse_object
from serve.calls.client import CALLER, CLIENT, Client
from serve.calls.decode import decode
from serve.calls.prompts import of_client
from serve.http.access import Access, OpenCalls, RouteScope, caller_of
from serve.http.errors import NATIVE, ErrorFormat, refusal_response
from serve.http.first_token import STREAMS, first_token_headers, note_streams

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_BODY_BYTES = "penstock.max_body_bytes"  # key in the ASGI scope of a request; the value is its route's limit
LARGE_BODIES = "penstock.large_bodies"  # key in the ASGI scope of a request; the value is the server's `LargeBodies`
MAX_LARGE_BYTES = 2**30  # memory for all large bodies that are being received or decoded
LARGE_BYTES = 2**20  # bodies up to this size are received even if large bodies use all their memory
PLAIN_ID = re.compile(rb"[!-~]{1,128}")  # matches an x-request-id that the answer may repeat
CLIENT_GONE = 499  # status in the access log if the client disconnected

logger = logging.getLogger("penstock.http")
Handler = Callable[[HttpRequest, "EngineCore"], Awaitable[ASGIApp]]
T = TypeVar("T")
BODIES: dict[Handler, tuple[type, ...]] = {}  # body classes that each handler decodes, set by `decodes`


def decodes(*bodies: type) -> Callable[[Handler], Handler]:
    """Decorate a handler with the body class that it decodes, for OpenAPI. Several classes are alternatives."""

    def declare(handler: Handler) -> Handler:
        BODIES[handler] = bodies
        return handler

    return declare


class RouteSpec(NamedTuple):
    """One route: its handler, the clients that may call it (`scope`), and its error format.

    `takes_ids`: prompts may be token ids, which need larger bodies than text. `takes_tensors`: bodies may contain
    weights.
    """

    methods: tuple[str, ...]
    path: str
    handler: Handler
    scope: RouteScope
    error_format: ErrorFormat = NATIVE
    takes_ids: bool = False
    takes_tensors: bool = False


class ClientGoneError(Exception):
    """Raised if the client disconnected before its answer was ready."""


class LargeBodies:
    """Limits the memory of all bodies that a server is receiving and decoding.

    Without the limit, a few connections that each send a body of the largest size would fill the memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def add(self, num_bytes: int, body_bytes: int) -> None:
        """Count `num_bytes` that arrived for a body, which now has `body_bytes` in total.

        Raises `Overloaded` if the body is large and the limit is exceeded.
        """
        self.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes and body_bytes > LARGE_BYTES:
            raise Overloaded("Too many large bodies are being received.")


UNLIMITED = LargeBodies(2**63)  # for admin routes, whose bodies may contain weights


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The ASGI application of one route. Every error of its handler becomes a response in the route's format."""

    handler: Handler
    core: EngineCore
    error_format: ErrorFormat
    access: Access
    route_scope: RouteScope
    path: str  # pattern of the route's path
    max_body_bytes: int
    open_calls: OpenCalls
    large_bodies: LargeBodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[MAX_BODY_BYTES] = self.max_body_bytes
        scope[LARGE_BODIES] = self.large_bodies if self.route_scope is RouteScope.USER else UNLIMITED
        try:
            client = self.access.admit(scope, self.route_scope)
        except RequestError as refused:
            await self._send(self._refusal(scope, refused), scope, receive, send)
            return
        if self.route_scope is not RouteScope.USER:
            await self._answer(client, scope, receive, send)
            return
        try:
            with self.open_calls.slot(client, scope):
                await self._answer(client, scope, receive, send)
        except TooManyRequests as refused:  # raised by `slot`, before the answer begins
            await self._send(self.error_format.response(refused), scope, receive, send)

    async def _answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        CLIENT.set(client)
        STREAMS.set([])
        request = HttpRequest(scope, receive)
        CALLER.set(caller_of(request.headers, self.core.plan.observe))
        await self._send(await self._response(request), scope, receive, send)

    async def _response(self, request: HttpRequest) -> ASGIApp:
        try:
            return await self.handler(request, self.core)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except RequestError as refused:
            # The traceback and its frames form a cycle that holds the body. This line frees the body without a garbage
            # collection.
            refused.__traceback__ = refused.__context__ = None
            return self.error_format.response(refused)
        except Exception as error:  # an error must not affect other requests
            return self.error_format.response(error)

    def _refusal(self, scope: Scope, refused: RequestError) -> Response:
        if self.error_format is not NATIVE:
            return self.error_format.response(refused)
        return refusal_response(scope["path"], refused)

    async def _send(self, response: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if self.core.metrics is not None:
            self.core.metrics.http[self.path, getattr(response, "status_code", 200)] += 1
        await response(scope, receive, _with_headers(scope, send, STREAMS.get() or ()))


def _with_headers(scope: Scope, send: Send, streams: Sequence[OutputStream]) -> Send:
    """Return a `send` that adds x-request-id and the headers with the time to first token.

    The request id is the client's own id if it is valid, and a new id otherwise.
    """
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    request_id = given if PLAIN_ID.fullmatch(given) else uuid4().hex.encode()

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", request_id),
                *first_token_headers(streams),
            ]
        await send(message)

    return send_with_id


# --- the body ---


async def read_body(
    request: HttpRequest, decode: Callable[[bytes], T], *, inline_bytes: int = INLINE_BYTES, any_type: bool = False
) -> T:
    """Return `decode(body)`. A large or slow body is decoded in a thread, so `decode` must have no side effects.

    `inline_bytes`: largest body that is decoded on the event loop; pass 0 if small bodies can also take long.

    Raises the errors of `decode`; `InvalidRequest` if the body is not declared as JSON (any content type is accepted
    with `any_type`) or is compressed; `PayloadTooLarge` as soon as the announced or received size exceeds the limit;
    and `Overloaded` if large bodies take too much memory.
    """
    require_json(request, any_type=any_type)
    limit: int = request.scope[MAX_BODY_BYTES]
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size, bodies = 0, request.scope[LARGE_BODIES]
    try:
        async for part in request.stream():
            size += len(part)
            bodies.add(len(part), size)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
        return await off_loop(lambda: decode(b"".join(parts)), small=size <= inline_bytes, large=size > TURN_BYTES)
    finally:
        bodies.num_bytes -= size


async def read_as(request: HttpRequest, body: type[T]) -> T:
    """Read the request's body, and decode it to a body class. Raises like `read_body`, `parse_object` and `decode`."""
    return await read_body(request, lambda raw: decode(body, parse_object(raw)))


async def read_call(
    request: HttpRequest,
    core: EngineCore,
    read: Callable[[EngineCore, bytes], T],
    *,
    inline_bytes: int = INLINE_BYTES,
    any_type: bool = False,
) -> T:
    """Read the body of a call for the engine, and return `read(core, body)`.

    Raises `Overloaded` before the body is read if the queue is full, and the errors of `read_body`.
    """
    core.check_queue_space()
    try:
        return await read_body(request, partial(read, core), inline_bytes=inline_bytes, any_type=any_type)
    except ContextOverflow as error:
        if core.metrics is not None:
            core.metrics.refused(error)
        raise


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body has more than the {limit} bytes that this route accepts (--max-body-bytes).")


def require_json(request: HttpRequest, *, any_type: bool = False) -> None:
    """Raise `InvalidRequest` if the body is not declared as JSON, or is compressed.

    `any_type`: accept any content type. Browsers let pages of other sites send some other content types without a
    preflight request. `Access` already refuses such requests by their `Origin`; this check is a second barrier.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not any_type:
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(f"The body's content-encoding ({encoding[:40]}) is not supported; send it uncompressed.")


# --- the answer ---


async def read_all_or_disconnect(streams: Sequence[OutputStream], receive: Receive) -> list[list[Chunk]]:
    """Return the chunks of every stream, as `read_all` does.

    If the client disconnects first, abort every request and raise `ClientGoneError`.
    """
    note_streams(streams)
    try:
        return await or_disconnect(read_all(streams), receive)
    finally:
        close_all(streams)  # needed if the task was cancelled before its first step


async def compute(http: HttpRequest, core: EngineCore, requests: Sequence[Request]) -> list[list[Chunk]]:
    """Submit the client's requests, and return their complete output.

    Raises the engine's errors, `InvalidRequest` for too many log-probabilities, and `ClientGoneError` if the client
    disconnects first.
    """
    return await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)


async def or_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise `ClientGoneError`."""
    async with background_tasks(work, until_disconnect(receive)) as (working, gone):
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    if not working.cancelled():
        return working.result()
    gone.result()  # raises the error of `receive`, if any
    raise ClientGoneError


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json")


def list_page(http: HttpRequest, items: Sequence[Mapping[str, Any]], *, limit: int, max_limit: int) -> Response:
    """Return one page of a list in OpenAI's format. `items` are sorted newest first, and each has an `id`.

    Query parameters: `order` (desc or asc), `after` (the id of the last item before the page), `limit` (items per
    page). Raises `InvalidRequest` for invalid parameters.
    """
    query = http.query_params
    order, num_items = query.get("order", "desc"), query.get("limit", str(limit))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    if not (num_items.isascii() and num_items.isdecimal() and len(num_items) < 10 and 1 <= int(num_items) <= max_limit):
        raise InvalidRequest(f"limit must be in [1, {max_limit}].", param="limit")
    ordered = list(items) if order == "desc" else list(reversed(items))
    if after := query.get("after"):
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest("after is not the id of an item in this list.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(num_items)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(ordered) > len(page)
    return json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})
