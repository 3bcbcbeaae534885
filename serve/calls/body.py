"""Parse request bodies: limit their size, decode large bodies in threads, and report fields that no API has."""

from __future__ import annotations

import codecs
import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import orjson

from runtime.errors import InvalidRequest, TakesLong
from serve.calls.decode import Noted, decode
from serve.calls.json_pieces import freed_when_refused, loads

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.config.plan import Plan

logger = logging.getLogger("penstock.http")
T = TypeVar("T")


TEXT_BYTES = 2_000_000
IDS_BYTES = 10_000_000  # limit for routes that accept token ids; one id takes up to ten characters
TENSOR_BYTES = 2**32  # limit for routes that accept weights
MEDIA_BYTES = 64 * 2**20  # limit of a server that takes images
BYTES_PER_TOKEN = 8  # bytes of body allowed per token of context, so that a text as long as the context is accepted
INLINE_BYTES = 4096  # bodies larger than this are decoded in a thread; decoding this many bytes can take 3 ms
TURN_BYTES = 65_536  # bodies larger than this are decoded one at a time
MAX_LOGGED = 256  # maximum number of unknown field names that are logged

_LARGE_WORK: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("penstock_large_work")


def max_body_bytes(plan: Plan, *, takes_ids: bool, takes_tensors: bool = False) -> int:
    """Return the maximum size in bytes of a route's body.

    `takes_ids`: whether the route accepts token ids as well as text. `takes_tensors`: whether it accepts weights, which
    --max-body-bytes does not limit. `json_pieces` limits the number of values in a body.
    """
    if takes_tensors:
        return TENSOR_BYTES
    if plan.serve.max_body_bytes is not None:
        return plan.serve.max_body_bytes
    images = MEDIA_BYTES if plan.media.enabled else 0
    return max(IDS_BYTES if takes_ids else TEXT_BYTES, BYTES_PER_TOKEN * plan.model.context_length, images)


async def off_loop(work: Callable[[], T], *, small: bool, large: bool = False) -> T:
    """Call `work`, in a thread unless it is `small`, and return its result.

    If small `work` raises `TakesLong`, `work` is called again in a thread. Therefore `work` must have no side effects.
    `large` work runs on one thread at a time: it holds the GIL, so further threads would only delay the event loop.
    """
    if small:
        with suppress(TakesLong):
            return work()
    return await anyio.to_thread.run_sync(freed_when_refused, work, limiter=_large_limiter() if large else None)


def _large_limiter() -> anyio.CapacityLimiter:
    """Return the running event loop's limiter for `large` work."""
    try:
        return _LARGE_WORK.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _LARGE_WORK.set(limiter)
        return limiter


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises `InvalidRequest` if `body` is not one JSON object in UTF-8, and `PayloadTooLarge` if it has too many values.
    """
    if not body:
        raise InvalidRequest("The body is empty; a JSON object is expected.")
    try:
        value = loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {_syntax_error(body, error)}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _syntax_error(body: bytes, error: orjson.JSONDecodeError) -> str:
    if body.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark; remove it"
    try:
        body.decode()
    except UnicodeDecodeError as invalid:
        return f"it is not UTF-8 (see the byte at index {invalid.start})"
    return f"the error is at line {error.lineno}, column {error.colno}"


def decode_open(
    cls: type[T], json: Mapping[str, Any], core: EngineCore, route: str, *, also_known: Collection[str] = ()
) -> T:
    """Decode a body with `decode`, and report its unknown fields with `report_unknown`.

    `also_known`: top-level names that other code reads, which are therefore not reported. Raises `InvalidRequest` for
    invalid fields, and with --refuse-unknown-fields also for unknown fields.
    """
    unknown: Noted = {}
    body = decode(cls, json, noted=unknown)
    report_noted(unknown, core, route, also_known=also_known)
    return body


def report_noted(noted: Noted, core: EngineCore, route: str, *, also_known: Collection[str] = ()) -> None:
    """Call `report_unknown` for each key that `decode` noted, except for top-level names in `also_known`."""
    for (keys, name), path in noted.items():
        known = {*keys.names, *also_known} if len(path) == 1 else keys.names
        if len(path) > 1 or name not in also_known:
            report_unknown(path, known, core, route)


def report_unknown(
    path: Sequence[str | int],
    known: Collection[str],
    core: EngineCore,
    route: str,
    *,
    fate: str = "which is ignored",
) -> None:
    """Log a field that no API has. A field that occurs in several items of a list is logged once.

    With --refuse-unknown-fields, raise `InvalidRequest` instead. The error message suggests the most similar name in
    `known`. `fate` is the part of the log line that tells what happens to the field.
    """
    path = [str(each)[:80] if isinstance(each, str) else each for each in path]
    if not core.plan.serve.refuse_unknown_fields:
        # The limit keeps a client that invents field names from filling the log.
        if _log_unknown.cache_info().currsize < MAX_LOGGED:
            _log_unknown(".".join(each for each in path if isinstance(each, str)), route, fate)
        return
    name = ".".join(map(str, path))
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise InvalidRequest(f"{name} is not a field of this route{hint}", param=name)


@cache
def _log_unknown(name: str, route: str, fate: str) -> None:
    """Log a field once per name, route and fate: the cache remembers earlier calls."""
    logger.warning("a request to %s has a field that no API knows, %s: %r", route, fate, name)
