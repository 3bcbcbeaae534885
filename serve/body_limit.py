"""How large a request's body may be: in bytes before it has arrived in full, in values once it has. And reading it.

Parsing holds the interpreter for its whole time, in whichever thread it runs, and so do the streams of everybody
else. What takes long are not long texts (10 MB in 10 ms) but many small values (10 MB of short lists in 830 ms, of
short keys in 180, of token ids in 80): lists, objects and texts are counted before they are read, and long lists of
numbers are read in pieces.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import orjson

from runtime.errors import PayloadTooLarge

if TYPE_CHECKING:
    from runtime.config.plan import Plan

TEXT_BYTES = 2_000_000
IDS_BYTES = 10_000_000  # where prompts may be token ids: up to ten characters each
BYTES_PER_TOKEN = 8  # a context's worth of text is always accepted
MAX_CONTAINERS = 50_000  # lists and objects in one body: 4096 messages with a dozen each

MAX_STRINGS = 150_000  # keys and texts in one body: as many biases as a vocabulary has tokens
PIECE_BYTES = 65_536  # of a list of numbers that are read at once, in half a millisecond
SHORT_BYTES = 64  # of a list of numbers that is no trouble: there are not that many lists

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BEGINNING = re.compile(rb"%b|\[[-+.\deE, \t\r\n]{%d}" % (_STRING.pattern, SHORT_BYTES), re.DOTALL)
_NUMBERS = re.compile(rb"[-+.\deE, \t\r\n]{0,%d}+" % PIECE_BYTES)


def max_body_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """What a route accepts that takes text, or token ids too."""
    if plan.serve.max_body_bytes is not None:
        return plan.serve.max_body_bytes
    return max(IDS_BYTES if takes_ids else TEXT_BYTES, BYTES_PER_TOKEN * plan.model.context_length)


def check_values(body: bytes) -> None:
    """Raises `PayloadTooLarge` for more lists and objects, or keys and texts, than any honest body holds."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise PayloadTooLarge(f"The body holds more than {MAX_STRINGS} keys and texts.")
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    outside = start = 0
    for string in _STRING.finditer(body):  # texts may hold as many brackets as they like
        outside += body.count(b"[", start, string.start()) + body.count(b"{", start, string.start())
        start = string.end()
        if outside > MAX_CONTAINERS:
            break
    outside += body.count(b"[", start) + body.count(b"{", start)
    if outside > MAX_CONTAINERS:
        raise PayloadTooLarge(f"The body holds more than {MAX_CONTAINERS} lists and objects.")


def loads(body: bytes) -> Any:
    """As `orjson.loads`, but other threads get the interpreter while the numbers of a large body are read.

    What is wrong in such a body is placed where a list of numbers begins, or behind the last one.
    """
    if len(body) <= PIECE_BYTES:
        return orjson.loads(body)
    mark = secrets.token_hex(16)  # nobody can send it
    lists: dict[str, list[Any]] = {}
    rest: list[bytes] = []
    start = at = 0
    try:
        for found in _BEGINNING.finditer(body):  # what looks like a list may be within a text
            if not body.startswith(b"[", found.start()):
                continue
            stop = _end_of_numbers(body, found.end())
            if body.startswith(b"]", stop):
                at, name = found.start(), f"{mark}{len(lists)}"
                lists[name] = _numbers(body, at + 1, stop)
                rest += (body[start:at], b'"%b"' % name.encode())
                start = at = stop + 1
        root = [orjson.loads(b"".join([*rest, body[start:]]))]
    except orjson.JSONDecodeError as error:  # it is near, but the place in the whole is not known
        raise orjson.JSONDecodeError(error.msg, body[:at].decode("latin-1"), at) from None
    places: list[Any] = [root]
    while places:
        place = places.pop()
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if isinstance(value, str) and value in lists:
                place[key] = lists[value]
            elif isinstance(value, dict | list):
                places.append(value)
    return root[0]


def _end_of_numbers(body: bytes, at: int) -> int:
    """The first place from `at` on with what belongs to no number."""
    while (found := _NUMBERS.match(body, at)) is not None and found.end() > at:
        at = found.end()
    return at


def _numbers(body: bytes, start: int, end: int) -> list[Any]:
    """The numbers between, in pieces that end at a comma. Raises `orjson.JSONDecodeError` as for the whole."""
    values: list[Any] = []
    while start <= end:
        comma = body.find(b",", start + PIECE_BYTES, end)
        stop = end if comma < 0 else comma
        piece = orjson.loads(b"[%b]" % body[start:stop])
        if not piece and (values or stop < end):
            raise orjson.JSONDecodeError("no number between commas", "", 0)
        values += piece
        start = stop + 1
    return values
