"""JSON of any size, read so that other threads get the interpreter every millisecond.

`orjson.loads` holds the interpreter until it is done, in whichever thread it runs, and so everybody's streams wait:
10 MB of texts take 10 ms, of token ids 100, of short lists 800. So a large body is read in pieces, which end behind a
comma between two values. A piece is completed with the brackets that are open where it begins and where it ends: of

    {"a": [1, 2,      3, 4], "b": 5}

the pieces are read as {"a": [1, 2, END]} and {MARK: [3, 4], "b": 5}, and what the second one holds is added to the
list and the object that were open. Texts that are longer than a piece are read by themselves.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import orjson

from runtime.errors import InvalidRequest, PayloadTooLarge, RequestError

PIECE_BYTES = 32_768  # half a millisecond of token ids
FREED_VALUES = 1000  # at a time
PAUSE_S = 50e-6  # behind each: who waits for the interpreter gets it at once, not after the switch interval
MAX_CONTAINERS = 50_000  # lists and objects in one body: 4096 messages with a dozen each
MAX_STRINGS = 150_000  # keys and texts in one body: as many biases as a vocabulary has tokens

_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # a text
_STRING = re.compile(rb'"%b"' % _INSIDE, re.DOTALL)
_STRINGS = re.compile(rb'[^"]*+(?:"%b"[^"]*+)*+' % _INSIDE, re.DOTALL)
# Each with the comma behind it.
_VALUES = re.compile(rb'(?:[^",]*+(?:"%b"[^",]*+)*+,)*+' % _INSIDE, re.DOTALL)
_TEXT = re.compile(_INSIDE, re.DOTALL)
_BETWEEN = re.compile(rb'[^"\\/bfnrtu0-9a-fA-F\x80-\xbf]')  # no later byte of an escape or a character
_COLON = re.compile(rb"[ \t\r\n]*+:")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING = bytes.maketrans(b"[{", b"]}")


T = TypeVar("T")
_LARGE: ContextVar[list[Any] | None] = ContextVar("penstock_large_values", default=None)


def freed_when_refused(work: Callable[[], T]) -> T:
    """What `work` returns. Where it raises `RequestError`, what `loads` gave it is freed here, some values at a time.

    Else whoever drops the error would free millions of values at once, on the event loop. The error loses its frames,
    which hold them. Only for work that has no effects.
    """
    large: list[Any] = []
    token = _LARGE.set(large)
    try:
        return work()
    except RequestError as refused:
        refused.__traceback__ = refused.__context__ = None
        _free(large)
        raise
    finally:
        _LARGE.reset(token)


def _free(places: list[Any]) -> None:
    """Empty these lists and objects, the innermost first."""
    for place in reversed(places):
        while place:
            if isinstance(place, dict):
                for _ in range(min(FREED_VALUES, len(place))):
                    place.popitem()
            else:
                del place[-FREED_VALUES:]
            time.sleep(PAUSE_S)


def loads(body: bytes) -> Any:
    """As `orjson.loads`, of bodies up to a piece. Raises `orjson.JSONDecodeError`.

    Of larger ones also `PayloadTooLarge` for more lists and objects, keys and texts or longer keys than any honest body
    holds, and `InvalidRequest` for an object that has the key of a long value twice.
    """
    if len(body) <= PIECE_BYTES:
        return orjson.loads(body)
    reader = _Reader(body)
    try:
        _read_all(reader, body)
    except Exception:
        reader.free()
        raise
    return reader.root


def _read_all(reader: _Reader, body: bytes) -> None:
    at = 0
    while at < len(body):
        end, long_texts = _next_piece(body, at)
        try:
            reader.read(at, end, long_texts)
        except orjson.JSONDecodeError as error:
            raise _placed(error.msg, body, at) from None
        at = end
        time.sleep(PAUSE_S)


def _next_piece(body: bytes, at: int) -> tuple[int, list[tuple[int, int]]]:
    """Where the piece ends that begins at `at`, and where the long texts in it begin and end, quotes included."""
    long_texts: list[tuple[int, int]] = []
    start = at  # no comma between values is before it
    while start + PIECE_BYTES < len(body):
        stop = start + PIECE_BYTES
        if body.find(b'"', start, stop) < 0:  # the same, but faster
            end = max(body.rfind(b",", start, stop) + 1, start)
        else:
            end = _end(_VALUES, body, start, stop)
        if end > start:
            return end, long_texts
        start = _end(_STRINGS, body, start, stop)
        if start < stop:  # a text that does not end here
            end = _end_of_text(body, start + 1)
            if end - start > PIECE_BYTES:
                long_texts.append((start, end))
            start = end
    return len(body), long_texts


def _end_of_text(body: bytes, at: int) -> int:
    """Behind the quote that ends the text with `at` in it. Raises `orjson.JSONDecodeError` where none does."""
    start = at
    while at < len(body):
        stop = _end(_TEXT, body, at, at + PIECE_BYTES)
        if body.startswith(b'"', stop):
            return stop + 1
        if stop == at:  # a backslash with nothing behind it
            break
        at = stop
    raise _placed("a text has no end", body, start)


def _end(pattern: re.Pattern[bytes], body: bytes, at: int, stop: int) -> int:
    """Where a pattern that may match nothing ends."""
    found = pattern.match(body, at, stop)
    return at if found is None else found.end()


def _text(body: bytes, start: int, end: int) -> str:
    """The text between the quotes at both ends, read in pieces."""
    parts: list[str] = []
    at, last = start + 1, end - 1
    while at < last:
        between = _BETWEEN.search(body, at + PIECE_BYTES, last)
        stop = last if between is None else between.start()
        parts.append(orjson.loads(b'"%b"' % body[at:stop]))
        at = stop
    return "".join(parts)


def _placed(message: str, body: bytes, at: int) -> orjson.JSONDecodeError:
    """An error in the piece that begins at `at`."""
    error = orjson.JSONDecodeError(message, "", 0)
    error.lineno = body.count(b"\n", 0, at) + 1
    error.colno = at - body.rfind(b"\n", 0, at)
    return error


class _Reader:
    """What the pieces of a body have held so far."""

    def __init__(self, body: bytes) -> None:
        self.root: Any = None
        self._body = body
        self._mark = secrets.token_hex(16)  # nobody can send it, nor what begins with it
        self._end = f"{self._mark}end"
        self._open: list[Any] = []  # the lists and objects that the next piece goes on with, from the root on
        self._brackets = b""  # theirs
        self._num_containers = self._num_strings = 0

    def read(self, start: int, end: int, long_texts: list[tuple[int, int]]) -> None:
        """Read the next piece, which ends behind a comma or with the body."""
        texts: dict[str, str] = {}
        parts: list[bytes] = []
        for begin, stop in long_texts:
            if _COLON.match(self._body, stop):
                raise PayloadTooLarge(f"A key is longer than {PIECE_BYTES} bytes.")
            name = f"{self._mark}{len(texts)}"
            parts += (self._body[start:begin], b'"%b"' % name.encode())
            texts[name], start = _text(self._body, begin, stop), stop
        piece = b"".join([*parts, self._body[start:end]])
        brackets, num_kept = self._brackets_behind(piece)
        last = end == len(self._body)
        text = self._beginning() + (piece if last else piece[:-1] + self._ending(brackets))
        found = orjson.loads(text)
        if texts:
            found = _replaced(found, texts)
        if self._open:
            self._add(found)
        else:
            self.root = found
        if not last:
            self._open = self._still_open(self._open[:num_kept], len(brackets))
            if (large := _LARGE.get()) is not None:
                large += self._open[num_kept:]
            self._brackets = brackets

    def free(self) -> None:
        """Free what was read some values at a time: the error that ends the reading would free it at once."""
        _free(self._open)
        self.root, self._open = None, []

    def _brackets_behind(self, piece: bytes) -> tuple[bytes, int]:
        """The brackets that are open behind the piece, and how many of them were before. Raises `PayloadTooLarge`."""
        if b'"' in piece:
            piece, count = _STRING.subn(b"", piece)
            self._num_strings += count
        found = piece.translate(None, _NO_BRACKETS)
        self._num_containers += found.count(b"[") + found.count(b"{")
        if self._num_strings > MAX_STRINGS:
            raise PayloadTooLarge(f"The body holds more than {MAX_STRINGS} keys and texts.")
        if self._num_containers > MAX_CONTAINERS:
            raise PayloadTooLarge(f"The body holds more than {MAX_CONTAINERS} lists and objects.")
        behind = bytearray(self._brackets)
        num_kept = len(behind)
        for bracket in found:
            if bracket in b"[{":
                behind.append(bracket)
            elif behind:  # otherwise, and where it is the wrong one, orjson says so
                behind.pop()
                num_kept = min(num_kept, len(behind))
        return bytes(behind), num_kept

    def _beginning(self) -> bytes:
        """The brackets that are open before a piece, each but the last with the place of the one within."""
        inside = b'{"%b":' % self._mark.encode()
        return self._brackets[:-1].replace(b"{", inside) + self._brackets[-1:]

    def _ending(self, brackets: bytes) -> bytes:
        """What a piece lacks: a mark behind the last value, and the brackets that close those that are open."""
        if not brackets:
            return b","  # as it was: nothing may be behind the root
        end = b',"%b":0' if brackets.endswith(b"{") else b',"%b"'
        return end % self._end.encode() + brackets[::-1].translate(_CLOSING)

    def _add(self, found: Any) -> None:
        """What a piece holds, to what was open before it."""
        innermost = len(self._open) - 1
        for depth, place in enumerate(self._open):
            within = None
            if depth < innermost:
                within = found.pop(self._mark) if type(found) is dict else found.pop(0)
            elif not found:
                raise orjson.JSONDecodeError("no value behind a comma", "", 0)
            if type(place) is dict:
                place.update(found)
            else:
                place += found
            found = within

    def _still_open(self, places: list[Any], depth: int) -> list[Any]:
        """The lists and objects that are open behind a piece; `places` are those of them that were before it."""
        places = places or [self.root]
        while len(places) < depth:
            values = places[-1].values() if type(places[-1]) is dict else places[-1]
            within = next(reversed(values), None)
            if type(within) not in (dict, list):
                break
            places.append(within)
        place: Any = places[-1]
        if isinstance(place, dict):
            is_last = place.pop(self._end, None) is not None
        else:
            is_last = bool(place) and place.pop() == self._end
        if not is_last:  # the last value is not the last key's, because that key had been there before
            raise InvalidRequest("The body has an object with a key that occurs twice.")
        return places


def _replaced(found: Any, texts: dict[str, str]) -> Any:
    """`found` with the texts where their names stand."""
    if isinstance(found, str):
        return texts.get(found, found)
    places = [found]
    while places:
        place = places.pop()
        for key, value in list(place.items() if type(place) is dict else enumerate(place)):
            if type(value) is str and value in texts:
                place[key] = texts[value]
            elif type(value) in (dict, list):
                places.append(value)
    return found
