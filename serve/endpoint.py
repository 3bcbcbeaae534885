"""What every route has in common: reading the body, waiting for the output, and errors that become responses."""

from __future__ import annotations

import asyncio
import codecs
import difflib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.actors.output_stream import OutputStream, close_all, read_all
from runtime.errors import (
    ContextOverflow,
    InvalidRequest,
    PayloadTooLarge,
    RequestError,
    TakesLong,
    TooManyRequests,
)
from runtime.request import Chunk
from serve.access import CALLER, CLIENT, Access, Client, OpenCalls, RouteScope, caller_of
from serve.background import background_tasks
from serve.decode import Noted, decode
from serve.errors import NATIVE, ErrorFormat, refusal_response
from serve.json_pieces import freed_when_refused, loads

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.config.plan import Plan

MAX_BODY_BYTES = "penstock.max_body_bytes"  # in the scope of every request: of its route
TEXT_BYTES = 2_000_000
IDS_BYTES = 10_000_000  # where prompts may be token ids: up to ten characters each
BYTES_PER_TOKEN = 8  # a context's worth of text is always accepted
INLINE_BYTES = 4096  # decoding that many takes up to 3 ms (a batch of many objects); more goes to a thread
MAX_LOGGED = 256  # names of fields that no API knows
CLIENT_GONE = 499  # for access logs; the client does not read it

logger = logging.getLogger("penstock.http")
Handler = Callable[[HttpRequest, "EngineCore"], Awaitable[ASGIApp]]
T = TypeVar("T")


def max_body_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """How large the body of a route may be that takes text, or token ids too. `json_pieces` counts what it holds."""
    if plan.serve.max_body_bytes is not None:
        return plan.serve.max_body_bytes
    return max(IDS_BYTES if takes_ids else TEXT_BYTES, BYTES_PER_TOKEN * plan.model.context_length)


class ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The ASGI application of one route: every error of its handler becomes a response in the route's format."""

    handler: Handler
    core: EngineCore
    error_format: ErrorFormat
    access: Access
    route_scope: RouteScope
    path: str  # of the route
    max_body_bytes: int
    open_calls: OpenCalls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[MAX_BODY_BYTES] = self.max_body_bytes
        try:
            client = self.access.admit(scope, self.route_scope)
        except RequestError as refused:
            await self._send(self._refusal(scope, refused), scope, receive, send)
            return
        if self.route_scope is not RouteScope.USER:
            await self._answer(client, scope, receive, send)
            return
        try:
            with self.open_calls.one_of(client, scope):
                await self._answer(client, scope, receive, send)
        except TooManyRequests as refused:  # before an answer has begun: `_answer` raises none
            await self._send(self.error_format.response(refused), scope, receive, send)

    async def _answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        CLIENT.set(client)
        request = HttpRequest(scope, receive)
        CALLER.set(caller_of(request.headers, self.core.plan.observe))
        await self._send(await self._response(request), scope, receive, send)

    async def _response(self, request: HttpRequest) -> ASGIApp:
        try:
            return await self.handler(request, self.core)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except RequestError as refused:
            # Their frames hold the body, in a circle: it would be freed with many others when garbage is looked for.
            refused.__traceback__ = refused.__context__ = None
            return self.error_format.response(refused)
        except Exception as error:  # any error fails this request and nothing else
            return self.error_format.response(error)

    def _refusal(self, scope: Scope, refused: RequestError) -> Response:
        if self.error_format is not NATIVE:
            return self.error_format.response(refused)
        return refusal_response(scope["path"], refused)

    async def _send(self, response: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if self.core.metrics is not None:
            self.core.metrics.http[self.path, getattr(response, "status_code", 200)] += 1
        await response(scope, receive, send)


# --- the body ---


async def read_body(
    request: HttpRequest, decode: Callable[[bytes], T], *, inline_bytes: int = INLINE_BYTES
) -> T:
    """`decode(body)`, in a thread when the body is large or turns out to take long; `decode` has no effects.

    A route whose small bodies can make much work gives 0 as `inline_bytes`: it always decodes in a thread.
    Raises what `decode` raises, `InvalidRequest` unless the body is declared as JSON, and `PayloadTooLarge` as soon
    as too many bytes are announced or have arrived.
    """
    require_json(request)
    limit: int = request.scope[MAX_BODY_BYTES]
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return await off_loop(lambda: decode(b"".join(parts)), small=size <= inline_bytes)


async def read_call(
    request: HttpRequest,
    core: EngineCore,
    read: Callable[[EngineCore, bytes], T],
    *,
    inline_bytes: int = INLINE_BYTES,
) -> T:
    """`read(core, body)` of a call that is to be computed, as `read_body`.

    Raises `Overloaded` before anything of the body is looked at where the queue is full for everybody.
    """
    core.check_room()
    try:
        return await read_body(request, partial(read, core), inline_bytes=inline_bytes)
    except ContextOverflow as error:
        if core.metrics is not None:
            core.metrics.refused(error)
        raise


async def off_loop(work: Callable[[], T], *, small: bool) -> T:
    """What `work` returns: run at once where it is small, else in a thread, where it begins anew if it takes long.

    It must have no effects.
    """
    if small:
        with suppress(TakesLong):
            return work()
    return await anyio.to_thread.run_sync(freed_when_refused, work)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The body has more than the {limit} bytes that this route accepts (--max-body-bytes)."
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest` when `body` is not one JSON object in UTF-8, `PayloadTooLarge` when it holds too much."""
    if not body:
        raise InvalidRequest("The body is empty; a JSON object is expected.")
    try:
        value = loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {_trouble(body, error)}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _trouble(body: bytes, error: orjson.JSONDecodeError) -> str:
    if body.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark; leave that out"
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"it is not UTF-8, which the byte at {wrong.start} shows"
    return f"the trouble is at line {error.lineno}, column {error.colno}"


def decode_open(
    cls: type[T], json: Mapping[str, Any], core: EngineCore, route: str, *, beside: Collection[str] = ()
) -> T:
    """`decode(cls, json)` for a body that may hold fields that it does not know, which are told (`tell_unknown`).

    Not of that kind: the names in `beside`, which other readers of the body know. Raises as `decode`, and as that.
    """
    noted: Noted = {}
    body = decode(cls, json, noted=noted)
    tell_noted(noted, core, route, beside=beside)
    return body


def tell_noted(noted: Noted, core: EngineCore, route: str, *, beside: Collection[str] = ()) -> None:
    """Tell of the keys that `decode` noted in a body (`tell_unknown`), but for those `beside` on its first level."""
    for (keys, name), path in noted.items():
        known = {*keys.names, *beside} if len(path) == 1 else keys.names
        if len(path) > 1 or name not in beside:
            tell_unknown(path, known, core, route)


def tell_unknown(
    path: Sequence[str | int],
    known: Collection[str],
    core: EngineCore,
    route: str,
    *,
    fate: str = "which is ignored",
) -> None:
    """Log a field that no API knows, once for all places of a list.

    Raises `InvalidRequest` instead, with the nearest of the `known` names, where --refuse-unknown-fields says so.
    """
    path = [str(each)[:80] if isinstance(each, str) else each for each in path]
    if not core.plan.serve.refuse_unknown_fields:
        # A client with ever other names would fill the log.
        if _log_unknown.cache_info().currsize < MAX_LOGGED:
            _log_unknown(".".join(each for each in path if isinstance(each, str)), route, fate)
        return
    name = ".".join(map(str, path))
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise InvalidRequest(f"{name} is not a field of this route{hint}", param=name)


@cache
def _log_unknown(name: str, route: str, fate: str) -> None:
    """Logs each name once; the cache is the memory of that."""
    logger.warning("a request to %s has a field that no API knows, %s: %r", route, fate, name)


def require_json(request: HttpRequest) -> None:
    """Raises `InvalidRequest` unless the body is declared as JSON, and not as compressed.

    A page of another site may send other types here without being asked whether it is allowed to.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(
            f"The body's content-encoding ({encoding[:40]}) is not supported; send it uncompressed."
        )


# --- the answer ---


async def read_all_or_disconnect(streams: Sequence[OutputStream], receive: Receive) -> list[list[Chunk]]:
    """As `read_all`. Raises `ClientGoneError`, with every request aborted, when the client disconnects first."""
    try:
        return await or_disconnect(read_all(streams), receive)
    finally:
        close_all(streams)  # a task that was cancelled before its first step has not done it


async def or_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns. Raises `ClientGoneError`, with the work cancelled, when the client disconnects first."""
    async with background_tasks(work, until_disconnect(receive)) as (working, gone):
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    if not working.cancelled():
        return working.result()
    gone.result()  # raises what `receive` raised
    raise ClientGoneError


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200) -> Response:
    return Response(
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json"
    )


def list_page(
    http: HttpRequest, items: Sequence[Mapping[str, Any]], *, limit: int, max_limit: int
) -> Response:
    """A page of a list of OpenAI's; `items` come newest first, each has an `id`.

    The query's `order` is desc or asc, `after` the id before the page, `limit` the page's length, else ours. Raises
    `InvalidRequest`.
    """
    query = http.query_params
    order, given = query.get("order", "desc"), query.get("limit", str(limit))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= max_limit):
        raise InvalidRequest(f"limit must be in [1, {max_limit}].", param="limit")
    found = list(items) if order == "desc" else list(reversed(items))
    if after := query.get("after"):
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidRequest("after is the id of nothing in this list.", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(given)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(found) > len(page)
    return json_response(
        {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
    )
