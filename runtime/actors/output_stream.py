"""The output of one request: a stream of chunks, or the whole output. Unread chunks are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from runtime.actors.request_times import RequestTimes
from runtime.errors import InvalidRequest, PenstockError
from runtime.request import Chunk, Logprobs

Push = Callable[[Chunk], bool]
MAX_UNREAD_BYTES = 16 * 1024 * 1024  # a request is aborted if more bytes of its output are unread by its client
MAX_WHOLE_BYTES = 256 * 1024 * 1024  # a request that is read with `whole` fails if its output is larger
ID_BYTES = 32  # memory of a Python integer in a list
LOGPROB_BYTES = 96  # memory of a pair of a float and an integer
TOO_LARGE = (
    f"The output takes more than {MAX_WHOLE_BYTES // 1024**2} MB: stream it, or ask for fewer tokens, choices or "
    "log-probabilities."
)


class OutputStream:
    """The output of a submitted request: chunks of all its choices, where `Chunk.index` is the choice.

    One reader calls `chunks` (streaming) or `whole` (all at once). If it leaves the iteration or calls `close` before
    the end, the request is aborted and its pages are freed.
    """

    __slots__ = (
        "_abort",
        "_error",
        "_max_unread_bytes",
        "_num_open",
        "_push",
        "_push_error",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "_whole",
        "request_id",
        "times",
    )

    def __init__(self, request_id: int, num_choices: int, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._abort = abort  # aborts the request with the given id, which ends its output
        self._num_open = num_choices
        self._unread: dict[int, _Coalesced] = {}
        self._unread_bytes = 0
        self._max_unread_bytes = MAX_UNREAD_BYTES
        self._error: PenstockError | None = None
        self._push: Push | None = None
        self._push_error: Exception | None = None  # exception raised by `_push`, to be raised in the reader
        self._waiter: asyncio.Future[None] | None = None
        self._whole: _WholeReader | None = None  # shared by all streams of one `read_all` call
        self.times: RequestTimes | None = None  # times of the request; set by the table of live requests

    @property
    def finished(self) -> bool:
        """Whether every choice has ended. Unread chunks may remain."""
        return self._num_open == 0 or self._error is not None

    # --- for writers: the detokenizer and the table of live requests ---

    def put(self, chunk: Chunk) -> None:
        """Add a chunk and wake the reader. The chunk is merged with an unread chunk of the same choice."""
        if self._push is not None and self._waiter is not None and self._pushed(self._push, chunk):
            if chunk.finish is not None:
                self._num_open -= 1
                self._wake()
            return
        unread = self._unread.get(chunk.index)
        if unread is None:
            self._unread[chunk.index] = _Coalesced(chunk)
        else:
            unread.add(chunk)
        if chunk.finish is not None:
            self._num_open -= 1
        had_bytes = self._unread_bytes
        self._unread_bytes += len(chunk.text) + ID_BYTES * len(chunk.ids)
        if chunk.logprobs is not None:
            self._unread_bytes += _num_bytes(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self._unread_bytes += _num_bytes(chunk.prompt_logprobs)
        if chunk.prompt_ids is not None:
            self._unread_bytes += ID_BYTES * len(chunk.prompt_ids)
        if self._whole is not None:
            if self._unread_bytes > MAX_WHOLE_BYTES and not self.finished:
                self._abort(self.request_id)
                self.fail(InvalidRequest(TOO_LARGE))
            elif chunk.finish is not None and self._num_open == 0:
                self._whole.note_end()
            return
        # The limit is applied before the new chunk is added, because a single chunk (prompt log-probabilities) can
        # exceed it.
        if had_bytes > self._max_unread_bytes:
            self._abort(self.request_id)
        self._wake()

    def _pushed(self, push: Push, chunk: Chunk) -> bool:
        try:
            return push(chunk)
        except Exception as error:  # an exception in the reader's `push` must not end the writer
            self._push_error = error
            self._wake()
            return True

    def fail(self, error: PenstockError) -> None:
        """End the output with an error. The reader gets the error instead of the chunks that it has not read."""
        if not self.finished:
            self._error = error
            if self._whole is not None:
                self._whole.note_error(error)
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # --- for the reader: a handler ---

    async def chunks(
        self, push: Push | None = None, max_unread_bytes: int | None = None
    ) -> AsyncGenerator[list[Chunk], None]:
        """Yield the chunks that have arrived, at most one per choice, until every choice has ended.

        While the reader waits, `push` is called with each chunk. If `push` returns True, it has handled the chunk: the
        chunk is not yielded, and the reader's task need not wake. `push` must not block. An exception of `push` is
        raised here. The request is aborted if more than `max_unread_bytes` (None: `MAX_UNREAD_BYTES`) are unread.
        Raises the request's error (`RequestError`, `Overloaded`, `EngineFailure`).
        """
        self._push = push
        if max_unread_bytes is not None:
            self._max_unread_bytes = max_unread_bytes
        try:
            while True:
                if not self._unread and not self.finished:
                    await self._wait()
                if self._error is not None:
                    raise self._error
                if self._push_error is not None:
                    raise self._push_error
                if self._unread:
                    yield self._take()
                if self._num_open == 0 and not self._unread:
                    return
        finally:
            self._push = None
            self.close()

    async def whole(self) -> list[Chunk]:
        """Wait until every choice has ended. Return one chunk per choice, in order. Wakes the caller only once."""
        [chunks] = await read_all((self,))
        return chunks

    def close(self) -> None:
        """Abort the request, unless it has finished. A second call does nothing."""
        if not self.finished:
            self._abort(self.request_id)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take(self) -> list[Chunk]:
        unread, self._unread = self._unread, {}
        self._unread_bytes = 0
        return [coalesced.chunk() for coalesced in unread.values()]


async def read_all(streams: Sequence[OutputStream]) -> list[list[Chunk]]:
    """Wait for the whole output of every stream. Return, for each stream, one chunk per choice.

    Wakes the caller only once. If a request fails, its error is raised and the other requests are aborted. Cancellation
    aborts all requests.
    """
    reader = _WholeReader()
    try:
        for stream in streams:
            stream._whole = reader
            if stream._error is not None:
                raise stream._error
            reader.num_open += not stream.finished
        await reader.wait()
        return [sorted(stream._take(), key=lambda chunk: chunk.index) for stream in streams]
    finally:
        close_all(streams)


def close_all(streams: Sequence[OutputStream]) -> None:
    """Abort the requests that have not ended."""
    for stream in streams:
        stream.close()


class _WholeReader:
    """Waits until all streams of a `read_all` call have ended or one has failed, without a task per stream."""

    __slots__ = ("_error", "_waiter", "num_open")

    def __init__(self) -> None:
        self.num_open = 0
        self._error: PenstockError | None = None
        self._waiter = asyncio.get_running_loop().create_future()

    def note_end(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._wake()

    def note_error(self, error: PenstockError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if self.num_open:
            await self._waiter
        if self._error is not None:
            raise self._error


class _Coalesced:
    """The unread chunks of one choice, merged into one chunk."""

    __slots__ = ("_first", "_ids", "_last", "_logprobs", "_texts")

    def __init__(self, chunk: Chunk) -> None:
        self._first = self._last = chunk
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def add(self, chunk: Chunk) -> None:
        if self._last is self._first:
            self._append(self._first)
        self._append(chunk)
        self._last = chunk

    def _append(self, chunk: Chunk) -> None:
        self._texts.append(chunk.text)
        self._ids.extend(chunk.ids)
        if chunk.logprobs is not None:
            self._logprobs.append(chunk.logprobs)

    def chunk(self) -> Chunk:
        if self._last is self._first:
            return self._first
        return self._last._replace(
            text="".join(self._texts),
            ids=self._ids,
            logprobs=join_logprobs(self._logprobs),
            prompt_logprobs=self._first.prompt_logprobs or self._last.prompt_logprobs,
            prompt_ids=self._first.prompt_ids or self._last.prompt_ids,
        )


def join_logprobs(parts: list[Logprobs]) -> Logprobs | None:
    """Concatenate the log-probabilities of consecutive tokens. Return None for an empty list."""
    if len(parts) < 2:
        return parts[0] if parts else None
    joined = Logprobs([], [], [])
    for part in parts:
        joined.chosen.extend(part.chosen)
        joined.top.extend(part.top)
        joined.requested.extend(part.requested)
    return joined


def _num_bytes(logprobs: Logprobs) -> int:
    """Estimate the memory of log-probabilities, in bytes."""
    count = len(logprobs.chosen)
    count += sum(len(pairs) for pairs in logprobs.top if pairs is not None)
    count += sum(len(pairs) for pairs in logprobs.requested if pairs is not None)
    return LOGPROB_BYTES * count
