"""A link between the engine and a worker process: frames over a private socket.

A frame consists of a head of fixed size, a JSON part, and the bytes of arrays. The head has the number of bytes after
the head, and the number of bytes of the JSON part. A frame contains no pickles or other executable data. Both ends must
run the same version, on machines with the same byte order.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

HEAD = struct.Struct("<II")  # number of bytes after the head, number of bytes of the JSON part
MAX_FRAME_BYTES = 1 << 30
BUFFER_BYTES = 4 * 2**20
READ_BYTES = 1 << 16


class Frame(NamedTuple):
    """A message: its JSON part, and its int32 arrays by name."""

    body: dict[str, Any]
    arrays: dict[str, NDArray[np.int32]]


def encode(body: Mapping[str, Any], arrays: Mapping[str, NDArray[np.int32]] | None = None) -> bytes:
    """Encode a frame. `body` may contain dataclasses and sets. Arrays are sent as int32."""
    parts: list[Any] = []
    if arrays:
        flat = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
        body = {**body, "": [[name, array.shape] for name, array in flat.items()]}
        parts = [array.data.cast("B") if array.size else b"" for array in flat.values()]
    text = orjson.dumps(body, default=_to_json)
    length = len(text) + sum(len(part) for part in parts)
    return b"".join([HEAD.pack(length, len(text)), text, *parts])


def decode(content: bytearray | bytes, text_length: int) -> Frame:
    """Decode the part of a frame after its head. The arrays share the memory of `content`.

    Raises ValueError or TypeError if the bytes are not a frame.
    """
    body = orjson.loads(memoryview(content)[:text_length])
    if not isinstance(body, dict):
        raise ValueError("The JSON part of a frame must be an object.")
    arrays: dict[str, NDArray[np.int32]] = {}
    offset = text_length
    for name, shape in body.pop("", ()):
        size = math.prod(shape)
        # The bytes are read as uint8, because the offset may not be aligned for int32.
        flat = np.frombuffer(content, np.uint8, size * 4, offset)
        arrays[name] = flat.view(np.int32).reshape(shape)
        offset += size * 4
    return Frame(body, arrays)


class LinkClosed(Exception):
    """The other end has closed the link, or has sent invalid data, whose decoding error is the `__cause__`."""


class Link:
    """The engine's end of a link, on its event loop. Sending never blocks: if the socket is full, data is buffered."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        # The system's default may be a smaller size.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._frames: deque[Frame] = deque()
        self._backlog: deque[memoryview] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._open = True
        self._error: Exception | None = None  # the error that ended reading, if any
        self._loop.add_reader(end, self._read)

    def send(self, frame: bytes) -> None:
        """Send or buffer a frame. If the other end has closed the link, do nothing: `receive` reports this."""
        if not self._open:
            return
        rest = memoryview(frame)
        if not self._backlog:
            rest = rest[self._write(rest) :]
        if rest:
            if not self._backlog:
                self._loop.add_writer(self._socket, self._write_backlog)
            self._backlog.append(rest)

    async def receive(self) -> Frame:
        """Return the next frame. After the last frame of a closed link, raises `LinkClosed`.

        Only one task may read at a time. Cancellation does not lose a frame.
        """
        while not self._frames:
            if not self._open:
                raise LinkClosed from self._error
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._frames.popleft()

    def close(self) -> None:
        """Close the link. Must be called on the event loop. A second call does nothing."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._backlog.clear()
            self._socket.close()
            self._wake()

    def _write(self, content: memoryview) -> int:
        try:
            return self._socket.send(content)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the link is closed, which `receive` reports
            return len(content)

    def _write_backlog(self) -> None:
        while self._backlog:
            rest = self._backlog[0][self._write(self._backlog[0]) :]
            if rest:
                self._backlog[0] = rest
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            content = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            content = b""
        if not content:
            self.close()
            return
        self._unread += content
        try:
            while (size := _frame_size(self._unread)) is not None and len(self._unread) >= size:
                _, text_length = HEAD.unpack_from(self._unread)
                self._frames.append(decode(self._unread[HEAD.size : size], text_length))
                del self._unread[:size]
        except (ValueError, TypeError) as error:  # the start of the next frame is unknown, so reading stops
            self._error = error
            self.close()
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class WorkerLink:
    """The worker's end of a link. All calls block."""

    def __init__(self, end: socket.socket, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = end
        self._max_bytes = max_bytes
        self._sending = Lock()  # because other threads may send answers to `Runner.call`

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def address(self) -> str | None:
        """This machine's address on the connection to the engine, or None if the engine is on this machine."""
        if self._socket.family == socket.AF_UNIX:
            return None
        return self._socket.getsockname()[0]

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises `LinkClosed` if the engine has closed the link."""
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise LinkClosed from error

    def receive(self) -> Frame:
        """Return the next frame. Raises `LinkClosed` if the link has closed."""
        length, text_length = HEAD.unpack(self._exactly(HEAD.size))
        if length > self._max_bytes:
            raise ValueError(f"A frame of {length} bytes is too large.")
        return decode(self._exactly(length), text_length)

    def _exactly(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise LinkClosed from error
            if not count:
                raise LinkClosed
            view = view[count:]
        return content


def _frame_size(content: bytearray) -> int | None:
    """Return the size of the frame at the start of `content`, or None if the head is incomplete."""
    if len(content) < HEAD.size:
        return None
    length, _ = HEAD.unpack_from(content)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"A frame of {length} bytes is too large.")
    return HEAD.size + length


def _to_json(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes.")
