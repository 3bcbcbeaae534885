"""The engine's Python API for code without `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import partial, wraps
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, overload
from weakref import finalize

import anyio
from anyio.from_thread import BlockingPortal

from runtime.errors import ConfigurationError, EngineClosed
from serve.background import event_loop_thread
from serve.python.engine import Engine

if TYPE_CHECKING:
    from serve.python.chat import Answer, Messages

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Params = ParamSpec("Params")


@overload
def _blocking(
    method: Callable[Concatenate[Engine, Params], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[SyncEngine, Params], Result]: ...
@overload
def _blocking(
    method: Callable[Concatenate[Engine, Params], Result],
) -> Callable[Concatenate[SyncEngine, Params], Result]: ...
def _blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of `SyncEngine` that calls this method of `Engine` and waits for its result."""

    @wraps(method)
    def call(self: SyncEngine, *args: Any, **options: Any) -> Any:
        return self._call(partial(method, self._engine, *args, **options))

    return call


class SyncEngine:
    """The engine for code without `await`; works in scripts, and in notebooks with a running event loop.

        with SyncEngine(model_path="...") as engine:
            print(engine.generate("Once upon a time")["text"])
            for piece in engine.stream("Once upon a time"):
                print(piece["delta"], end="")

    It runs an `Engine` on its own event loop in its own thread. Several threads may call it. Interrupting a call
    (Ctrl-C) aborts its request. An engine that is still open is closed when the process ends.
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
        """Load the model, and return when the engine accepts requests."""
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
        """End every request and release all resources. A second call does nothing."""
        self._loop_thread = None
        if self._at_exit is not None:
            self._at_exit()

    generate = _blocking(Engine.generate)
    chat = _blocking(Engine.chat)
    encode = _blocking(Engine.encode)
    classify = _blocking(Engine.classify)
    rerank = _blocking(Engine.rerank)
    score = _blocking(Engine.score)
    abort = _blocking(Engine.abort)
    flush_cache = _blocking(Engine.flush_cache)
    update_weights_from_disk = _blocking(Engine.update_weights_from_disk)
    load_lora_adapter = _blocking(Engine.load_lora_adapter)
    load_lora_adapter_from_tensors = _blocking(Engine.load_lora_adapter_from_tensors)
    unload_lora_adapter = _blocking(Engine.unload_lora_adapter)
    start_profile = _blocking(Engine.start_profile)
    stop_profile = _blocking(Engine.stop_profile)
    status = _blocking(Engine.status)
    metrics = _blocking(Engine.metrics)

    def stream(self, *args: Any, **options: Any) -> Generator[dict[str, Any], None, None]:
        """See `Engine.stream`."""
        yield from self._iterate(self._engine.stream(*args, **options))

    def chat_stream(self, messages: Messages, **options: Any) -> Generator[Answer, None, None]:
        """See `Engine.chat_stream`."""
        yield from self._iterate(self._engine.chat_stream(messages, **options))

    def _iterate(self, pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
        """Yield the pieces of a stream. When the caller leaves its loop, the stream is closed."""
        try:
            while True:
                try:
                    piece = self._call(pieces.__anext__)
                except StopAsyncIteration:
                    return
                yield piece
        # An interrupt may occur anywhere above; its traceback refers to this generator, which would not be closed.
        finally:
            if self._loop_thread is not None:
                self._loop_thread.call(_end, pieces)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the engine's event loop, and wait for the result. KeyboardInterrupt cancels the call."""
        call = _Call(function)
        try:
            return self._running.start_task_soon(call.run).result()
        except KeyboardInterrupt:
            self._running.call(call.cancel)
            raise KeyboardInterrupt("The call was aborted.") from None
        except BaseException:
            self._running.call(call.cancel)
            raise

    @property
    def _running(self) -> BlockingPortal:
        if self._loop_thread is None:
            raise EngineClosed("The engine is not running: use `with SyncEngine(...)`, or call `start`.")
        return self._loop_thread


class _Call:
    """One call on the engine's event loop. `cancel` also works before the call begins."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._cancelled = False
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> Any:
        if self._cancelled:
            return None
        with anyio.CancelScope() as self._scope:
            result = self._function()
            return await result if isawaitable(result) else result

    def cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()


async def _end(pieces: AsyncGenerator[Any, None]) -> None:
    """Close the generator, even while its last step is still being cancelled."""
    while True:
        try:
            await pieces.aclose()
            return
        except RuntimeError:  # the generator is still running
            await asyncio.sleep(0)
