"""The engine from Python for code without `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import finalize

import anyio
from anyio.from_thread import BlockingPortal

from runtime.actors.engine_core import Status
from runtime.errors import ConfigurationError, EngineClosed
from serve.background import event_loop_thread
from serve.engine import Engine

if TYPE_CHECKING:
    from serve.python_chat import Answer, Messages

Piece = TypeVar("Piece")


class SyncEngine:
    """The engine for code without `await`; works in scripts and, beside a running loop, in notebooks.

        with SyncEngine(model_path="...") as engine:
            print(engine.generate("Once upon a time")["text"])
            for piece in engine.stream("Once upon a time"):
                print(piece["delta"], end="")

    It runs an `Engine` on a loop of its own in a thread of its own. Calls may come from several threads; one
    that is interrupted (Ctrl-C) ends its request. An engine that nobody closed is closed when the process ends.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        self._engine = Engine(model_path, **options)
        self._loop_thread: BlockingPortal | None = None
        self._at_exit: finalize[[], SyncEngine] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Load the model; return when requests are taken."""
        if self._loop_thread is not None:
            raise EngineClosed("The engine is already started.")
        with ExitStack() as stack:
            loop_thread = stack.enter_context(event_loop_thread("penstock-sync"))
            try:
                loop_thread.call(self._engine.start)
            except ConfigurationError as error:
                raise error.with_traceback(None) from None
            stack.callback(loop_thread.call, self._engine.aclose)
            self._loop_thread = loop_thread
            self._at_exit = finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """End every request and give everything back. Does nothing the second time."""
        self._loop_thread = None
        if self._at_exit is not None:
            self._at_exit()

    def generate(self, *args: Any, **options: Any) -> Any:
        """See `Engine.generate`."""
        return self._call(partial(self._engine.generate, *args, **options))

    def stream(self, *args: Any, **options: Any) -> Generator[dict[str, Any], None, None]:
        """See `Engine.stream`."""
        yield from self._iterate(self._engine.stream(*args, **options))

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """See `Engine.chat`."""
        return self._call(partial(self._engine.chat, messages, **options))

    def chat_stream(self, messages: Messages, **options: Any) -> Generator[Answer, None, None]:
        """See `Engine.chat_stream`."""
        yield from self._iterate(self._engine.chat_stream(messages, **options))

    def _iterate(self, pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
        """The pieces of a stream; the stream ends when the caller leaves."""
        try:
            while True:
                try:
                    piece = self._call(pieces.__anext__)
                except StopAsyncIteration:
                    return
                yield piece
        finally:  # an interrupt may come anywhere above, and the traceback keeps this generator alive
            if self._loop_thread is not None:
                self._loop_thread.call(_end, pieces)

    def encode(self, *args: Any, **options: Any) -> Any:
        """See `Engine.encode`."""
        return self._call(partial(self._engine.encode, *args, **options))

    def classify(self, *args: Any, **options: Any) -> Any:
        """See `Engine.classify`."""
        return self._call(partial(self._engine.classify, *args, **options))

    def rerank(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        """See `Engine.rerank`."""
        return self._call(partial(self._engine.rerank, *args, **options))

    def score(self, *args: Any, **options: Any) -> list[list[float]]:
        """See `Engine.score`."""
        return self._call(partial(self._engine.score, *args, **options))

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call on the engine's loop and wait. Interrupted, it cancels the call."""
        call = _Call(function)
        try:
            return self._running.start_task_soon(call.run).result()
        except KeyboardInterrupt:
            self._running.call(call.cancel)
            raise KeyboardInterrupt("The call was ended.") from None
        except BaseException:
            self._running.call(call.cancel)
            raise

    def abort(self, rid: str = "", *, abort_all: bool = False) -> int:
        """See `Engine.abort`."""
        return self._call(partial(self._engine.abort, rid, abort_all=abort_all))

    def flush_cache(self) -> bool:
        """See `Engine.flush_cache`."""
        return self._call(self._engine.flush_cache)

    def start_profile(self, **options: Any) -> None:
        """See `Engine.start_profile`."""
        self._call(partial(self._engine.start_profile, **options))

    def stop_profile(self) -> str:
        """See `Engine.stop_profile`."""
        return self._call(self._engine.stop_profile)

    def status(self) -> Status:
        """See `Engine.status`."""
        return self._call(self._engine.status)

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._call(self._engine.metrics)

    @property
    def _running(self) -> BlockingPortal:
        if self._loop_thread is None:
            raise EngineClosed("The engine is not running: use `with SyncEngine(...)`, or start it.")
        return self._loop_thread


class _Call:
    """One call on the engine's loop, which can be cancelled before it has begun."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._cancelled = False
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> Any:
        if self._cancelled:
            return None
        with anyio.CancelScope() as self._scope:
            found = self._function()
            return await found if isawaitable(found) else found

    def cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()


async def _end(pieces: AsyncGenerator[Any, None]) -> None:
    """Close the generator, also while its last step is still being cancelled."""
    while True:
        try:
            await pieces.aclose()
            return
        except RuntimeError:  # it is running
            await asyncio.sleep(0)
