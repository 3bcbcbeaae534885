"""Parse JSON of any size in pieces, so that other threads can run about every millisecond.

`orjson.loads` holds the interpreter lock until it returns, in any thread, so all streams wait. 10 MB of strings take
10 ms, 10 MB of token ids 100 ms, and 10 MB of short lists 800 ms. Therefore a large body is read in pieces, which end
after a comma between two values. Each piece is completed with the brackets that are open at its start and at its end.
For example, the pieces of

    {"a": [1, 2,      3, 4], "b": 5}

are read as {"a": [1, 2, END]} and {MARK: [3, 4], "b": 5}. The values of the second piece are added to the list and the
object that were open. Strings longer than a piece are read separately.
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

PIECE_BYTES = 32_768  # size of a piece; token ids of this size take 0.5 ms
FREED_VALUES = 1000  # number of values freed at a time
PAUSE_S = 50e-6  # seconds to sleep after each piece, so that waiting threads run
MAX_CONTAINERS = 50_000  # limit on lists and objects in one body; enough for 4096 messages with 12 each
MAX_STRINGS = 150_000  # limit on keys and strings in one body; enough for one bias per token of a vocabulary

_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # matches the text between a string's quotes
_STRING = re.compile(rb'"%b"' % _INSIDE, re.DOTALL)
_STRINGS = re.compile(rb'[^"]*+(?:"%b"[^"]*+)*+' % _INSIDE, re.DOTALL)
# Matches complete values, each with the comma after it.
_VALUES = re.compile(rb'(?:[^",]*+(?:"%b"[^",]*+)*+,)*+' % _INSIDE, re.DOTALL)
_TEXT = re.compile(_INSIDE, re.DOTALL)
# Matches a byte that cannot continue an escape or a UTF-8 character: a string can be split before it.
_BETWEEN = re.compile(rb'[^"\\/bfnrtu0-9a-fA-F\x80-\xbf]')
_COLON = re.compile(rb"[ \t\r\n]*+:")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING = bytes.maketrans(b"[{", b"]}")


T = TypeVar("T")
_LARGE: ContextVar[list[Any] | None] = ContextVar("penstock_large_values", default=None)


def freed_when_refused(work: Callable[[], T]) -> T:
    """Return `work()`. If it raises `RequestError`, free the values that `loads` returned, `FREED_VALUES` at a time.

    Otherwise the event loop would free millions of values at once when the error is dropped. The error's traceback is
    removed, because its frames refer to the values. `work` must have no side effects.
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


def _free(containers: list[Any]) -> None:
    """Empty these lists and objects a few values at a time, the innermost ones first."""
    for container in reversed(containers):
        while container:
            if isinstance(container, dict):
                for _ in range(min(FREED_VALUES, len(container))):
                    container.popitem()
            else:
                del container[-FREED_VALUES:]
            time.sleep(PAUSE_S)


def loads(body: bytes) -> Any:
    """Parse a JSON body. Raises `orjson.JSONDecodeError` for invalid JSON.

    If the body is larger than one piece, also raises `PayloadTooLarge` for too many lists and objects, too many keys
    and strings, or too long keys, and `InvalidRequest` if an object repeats a key whose value spans pieces.
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
    """Return the end of the piece that begins at `at`, and (start, end) of each of its long strings with quotes."""
    long_texts: list[tuple[int, int]] = []
    start = at  # no comma before `start` can end the piece
    while start + PIECE_BYTES < len(body):
        stop = start + PIECE_BYTES
        if body.find(b'"', start, stop) < 0:  # no string, so any comma can end the piece
            end = max(body.rfind(b",", start, stop) + 1, start)
        else:
            end = _end(_VALUES, body, start, stop)
        if end > start:
            return end, long_texts
        start = _end(_STRINGS, body, start, stop)
        if start < stop:  # a string that ends after `stop`
            end = _end_of_text(body, start + 1)
            if end - start > PIECE_BYTES:
                long_texts.append((start, end))
            start = end
    return len(body), long_texts


def _end_of_text(body: bytes, at: int) -> int:
    """Return the index after the closing quote of the string that contains `at`.

    Raises `orjson.JSONDecodeError` if the string has no closing quote.
    """
    start = at
    while at < len(body):
        stop = _end(_TEXT, body, at, at + PIECE_BYTES)
        if body.startswith(b'"', stop):
            return stop + 1
        if stop == at:  # a backslash at the end of the body
            break
        at = stop
    raise _placed("a string has no closing quote", body, start)


def _end(pattern: re.Pattern[bytes], body: bytes, at: int, stop: int) -> int:
    """Return the end of the pattern's match at `at`, or `at` if it does not match."""
    match = pattern.match(body, at, stop)
    return at if match is None else match.end()


def _text(body: bytes, start: int, end: int) -> str:
    """Parse the string from `start` to `end` (with quotes) in pieces."""
    parts: list[str] = []
    at, last = start + 1, end - 1
    while at < last:
        between = _BETWEEN.search(body, at + PIECE_BYTES, last)
        stop = last if between is None else between.start()
        parts.append(orjson.loads(b'"%b"' % body[at:stop]))
        at = stop
    return "".join(parts)


def _placed(message: str, body: bytes, at: int) -> orjson.JSONDecodeError:
    """Return an error with the line and column of index `at`."""
    error = orjson.JSONDecodeError(message, "", 0)
    error.lineno = body.count(b"\n", 0, at) + 1
    error.colno = at - body.rfind(b"\n", 0, at)
    return error


class _Reader:
    """Reads the pieces of one body in order. `root` is the body's value, as far as it has been read."""

    def __init__(self, body: bytes) -> None:
        self.root: Any = None
        self._body = body
        self._mark = secrets.token_hex(16)  # random, so that clients cannot write it in a body
        self._end = f"{self._mark}end"
        self._open: list[Any] = []  # lists and objects that the next piece continues, from the root down
        self._brackets = b""  # opening brackets of `_open`
        self._num_containers = self._num_strings = 0

    def read(self, start: int, end: int, long_texts: list[tuple[int, int]]) -> None:
        """Read the next piece, which ends after a comma or at the end of the body."""
        texts: dict[str, str] = {}
        parts: list[bytes] = []
        for begin, stop in long_texts:
            if _COLON.match(self._body, stop):
                raise PayloadTooLarge(f"A key is longer than {PIECE_BYTES} bytes.")
            name = f"{self._mark}{len(texts)}"
            parts += (self._body[start:begin], b'"%b"' % name.encode())
            texts[name], start = _text(self._body, begin, stop), stop
        piece = b"".join([*parts, self._body[start:end]])
        brackets, num_kept = self._brackets_after(piece)
        last = end == len(self._body)
        text = self._beginning() + (piece if last else piece[:-1] + self._ending(brackets))
        value = orjson.loads(text)
        if texts:
            value = _replaced(value, texts)
        if self._open:
            self._add(value)
        else:
            self.root = value
        if not last:
            self._open = self._still_open(self._open[:num_kept], len(brackets))
            if (large := _LARGE.get()) is not None:
                large += self._open[num_kept:]
            self._brackets = brackets

    def free(self) -> None:
        """Free the values a few at a time. Dropping the reader after an error would free them all at once."""
        _free(self._open)
        self.root, self._open = None, []

    def _brackets_after(self, piece: bytes) -> tuple[bytes, int]:
        """Return the opening brackets that are open after the piece, and how many of them were already open before it.

        Raises `PayloadTooLarge` if the body has too many values.
        """
        if b'"' in piece:
            piece, count = _STRING.subn(b"", piece)
            self._num_strings += count
        in_piece = piece.translate(None, _NO_BRACKETS)
        self._num_containers += in_piece.count(b"[") + in_piece.count(b"{")
        if self._num_strings > MAX_STRINGS:
            raise PayloadTooLarge(f"The body has more than {MAX_STRINGS} keys and strings.")
        if self._num_containers > MAX_CONTAINERS:
            raise PayloadTooLarge(f"The body has more than {MAX_CONTAINERS} lists and objects.")
        after = bytearray(self._brackets)
        num_kept = len(after)
        for bracket in in_piece:
            if bracket in b"[{":
                after.append(bracket)
            elif after:  # ignore unmatched brackets: orjson reports them
                after.pop()
                num_kept = min(num_kept, len(after))
        return bytes(after), num_kept

    def _beginning(self) -> bytes:
        """Return the text to put before a piece: the brackets open at its start, with a marker key inside objects."""
        inside = b'{"%b":' % self._mark.encode()
        return self._brackets[:-1].replace(b"{", inside) + self._brackets[-1:]

    def _ending(self, brackets: bytes) -> bytes:
        """Return the text to put after a piece: a marker as the last value, and the brackets that close `brackets`."""
        if not brackets:
            return b","  # the piece continues after the complete body: the comma makes orjson report an error
        end = b',"%b":0' if brackets.endswith(b"{") else b',"%b"'
        return end % self._end.encode() + brackets[::-1].translate(_CLOSING)

    def _add(self, values: Any) -> None:
        """Add the values of a piece to the lists and objects that were open before it."""
        innermost = len(self._open) - 1
        for depth, container in enumerate(self._open):
            inner = None
            if depth < innermost:
                inner = values.pop(self._mark) if type(values) is dict else values.pop(0)
            elif not values:
                raise orjson.JSONDecodeError("no value after a comma", "", 0)
            if type(container) is dict:
                container.update(values)
            else:
                container += values
            values = inner

    def _still_open(self, containers: list[Any], depth: int) -> list[Any]:
        """Return the lists and objects that are open after a piece, and remove the end marker from the innermost.

        `containers` were open before the piece and are still open. `depth` is the number of open lists and objects.
        """
        containers = containers or [self.root]
        while len(containers) < depth:
            values = containers[-1].values() if type(containers[-1]) is dict else containers[-1]
            inner = next(reversed(values), None)
            if type(inner) not in (dict, list):
                break
            containers.append(inner)
        innermost: Any = containers[-1]
        if isinstance(innermost, dict):
            is_last = innermost.pop(self._end, None) is not None
        else:
            is_last = bool(innermost) and innermost.pop() == self._end
        if not is_last:  # an object repeats a key, and its last value is not the one that is still open
            raise InvalidRequest("The body has an object in which a key occurs twice.")
        return containers


def _replaced(value: Any, texts: dict[str, str]) -> Any:
    """Return the value with the long strings put back in place of their short names."""
    if isinstance(value, str):
        return texts.get(value, value)
    containers = [value]
    while containers:
        container = containers.pop()
        for key, item in list(container.items() if type(container) is dict else enumerate(container)):
            if type(item) is str and item in texts:
                container[key] = texts[item]
            elif type(item) in (dict, list):
                containers.append(item)
    return value
