"""The engine's Python API for code without `await`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial, wraps
from inspect import isawaitable
from os import PathLike, fspath
from threading import Lock
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload
from weakref import finalize

import anyio
from anyio.from_thread import BlockingPortal

import serve
from runtime.errors import ConfigurationError, EngineClosed
from runtime.request import Finish
from serve.background import event_loop_thread
from serve.python.arguments import Ids, Prompt, Sampling
from serve.python.display import ABORTED, show_one_line
from serve.python.engine import Engine
from serve.python.generation import Choice, Generation, Score, Token
from serve.python.options import with_signature
from serve.python.results import Piece
from serve.python.tokens import TokenizerView

if TYPE_CHECKING:
    from serve.python.chat import Answer, Messages

Piece_ = TypeVar("Piece_")
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
    """Return a method of `SyncEngine` that calls `method` of `Engine` and waits for the result."""

    @wraps(method)
    def call(self: SyncEngine, *args: Any, **options: Any) -> Any:
        return self._call(partial(method, self._engine, *args, **options))

    return call


@with_signature
class SyncEngine:
    """The engine for code without `await`, in scripts and in notebooks with a running event loop.

        engine = SyncEngine(model_path="...")
        print(engine.generate("Once upon a time", max_new_tokens=32).text)
        for piece in engine.stream("Once upon a time"):
            print(piece.delta, end="")

    Keywords are those of `Engine`. The first call starts the engine. To load the model earlier, call `start` or use
    `with SyncEngine(...) as engine`, which also closes the engine. Several threads may call the engine. Interrupting a
    call (Ctrl-C) aborts its request. An engine that is still open is closed when the process ends. Internally, an
    `Engine` runs on its own event loop in its own thread.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        self._engine = Engine(model_path, **options)
        self._loop_thread: BlockingPortal | None = None
        self._at_exit: finalize[[], SyncEngine] | None = None
        self._starting = Lock()
        self._closed = False
        self._posted: deque[Callable[[], None]] = deque()  # functions to call on the event loop, in order
        self._woken = False  # whether the event loop will run the calls in `_posted`

    def __repr__(self) -> str:
        state = "running" if self._loop_thread is not None else "closed" if self._closed else "not started"
        return f"<{type(self).__name__} {self._engine._life.path}, {state}>"

    def _repr_html_(self) -> str:
        return self._engine._repr_html_() if self._loop_thread is None else self._call(self._engine._repr_html_)

    def __enter__(self) -> Self:
        if self._loop_thread is None:
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Load the model, and return when the engine accepts requests. A closed engine may be started again."""
        with self._starting:
            if self._loop_thread is not None:
                raise EngineClosed("The engine is already started.")
            self._start()

    def _start(self) -> None:
        with ExitStack() as stack:
            loop_thread = stack.enter_context(event_loop_thread("penstock-sync"))
            try:
                loop_thread.call(self._engine.start)
            except ConfigurationError as error:
                raise error.with_traceback(None) from None
            stack.callback(loop_thread.call, self._engine.aclose)
            self._loop_thread, self._closed = loop_thread, False
            self._at_exit = finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """End every request and release all resources. A second call does nothing."""
        self._loop_thread, self._closed = None, True
        if self._at_exit is not None:
            self._at_exit()

    def shutdown(self) -> None:
        """End the engine. The same as `close`, under the name that SGLang uses."""
        self.close()

    @overload
    def generate(
        self,
        prompt: Prompt | Ids | None = ...,
        sampling_params: Sampling | None = ...,
        *,
        input_ids: Ids | None = ...,
        stream: Literal[True],
        **options: Any,
    ) -> Generator[Piece, None, None]: ...
    @overload
    def generate(
        self,
        prompt: Prompt | Ids | None = ...,
        sampling_params: Sampling | None = ...,
        *,
        input_ids: Ids | None = ...,
        stream: Literal[False] = ...,
        progress: bool = ...,
        **options: Any,
    ) -> Any: ...
    def generate(
        self,
        prompt: Prompt | Ids | None = None,
        sampling_params: Sampling | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Generate as `Engine.generate` does, and wait for the result. With `stream=True`, return an iterator."""
        if stream:
            return self.stream(prompt, sampling_params, **options)
        return self._call(partial(self._engine.generate, prompt, sampling_params, **options))

    async def async_generate(self, *args: Any, **options: Any) -> Any:
        """Generate without blocking the caller's own event loop, as SGLang's `Engine.async_generate` does.

        With `stream=True`, return an asynchronous iterator. Cancelling the call aborts the requests.
        """
        if options.get("stream"):
            del options["stream"]
            return self._iterate_async(self._engine.stream(*args, **options))
        return await self._call_async(partial(self._engine.generate, *args, **options))

    async def async_encode(self, *args: Any, **options: Any) -> Any:
        """Compute embeddings without blocking the caller's own event loop. See `Engine.encode`."""
        return await self._call_async(partial(self._engine.encode, *args, **options))

    async def async_score(self, *args: Any, **options: Any) -> Any:
        """Compute scores without blocking the caller's own event loop. See `Engine.score`."""
        return await self._call_async(partial(self._engine.score, *args, **options))

    chat = _blocking(Engine.chat)
    encode = _blocking(Engine.encode)
    classify = _blocking(Engine.classify)
    rerank = _blocking(Engine.rerank)
    score = _blocking(Engine.score)
    abort = _blocking(Engine.abort)
    flush_cache = _blocking(Engine.flush_cache)
    open_session = _blocking(Engine.open_session)
    close_session = _blocking(Engine.close_session)
    attach_storage = _blocking(Engine.attach_storage)
    detach_storage = _blocking(Engine.detach_storage)
    clear_storage = _blocking(Engine.clear_storage)
    update_weights_from_disk = _blocking(Engine.update_weights_from_disk)
    update_weights_from_tensor = _blocking(Engine.update_weights_from_tensor)
    init_weights_update_group = _blocking(Engine.init_weights_update_group)
    destroy_weights_update_group = _blocking(Engine.destroy_weights_update_group)
    update_weights_from_distributed = _blocking(Engine.update_weights_from_distributed)
    get_weights_by_name = _blocking(Engine.get_weights_by_name)
    weights_checker = _blocking(Engine.weights_checker)
    release_memory_occupation = _blocking(Engine.release_memory_occupation)
    resume_memory_occupation = _blocking(Engine.resume_memory_occupation)
    pause_generation = _blocking(Engine.pause_generation)
    continue_generation = _blocking(Engine.continue_generation)
    add_external_corpus = _blocking(Engine.add_external_corpus)
    remove_external_corpus = _blocking(Engine.remove_external_corpus)
    list_external_corpora = _blocking(Engine.list_external_corpora)
    load_lora_adapter = _blocking(Engine.load_lora_adapter)
    load_lora_adapter_from_tensors = _blocking(Engine.load_lora_adapter_from_tensors)
    unload_lora_adapter = _blocking(Engine.unload_lora_adapter)
    start_profile = _blocking(Engine.start_profile)
    stop_profile = _blocking(Engine.stop_profile)
    start_expert_distribution_record = _blocking(Engine.start_expert_distribution_record)
    stop_expert_distribution_record = _blocking(Engine.stop_expert_distribution_record)
    dump_expert_distribution_record = _blocking(Engine.dump_expert_distribution_record)
    status = _blocking(Engine.status)
    metrics = _blocking(Engine.metrics)

    get_server_info = _blocking(Engine.get_server_info)
    why_waiting = _blocking(Engine.why_waiting)
    prefix_tree = _blocking(Engine.prefix_tree)
    watch = _blocking(Engine.watch)
    on_logits = _blocking(Engine.on_logits)
    on_token = _blocking(Engine.on_token)
    on_step = _blocking(Engine.on_step)

    @property
    def tokenizer(self) -> TokenizerView:
        """The tokenizer. See `Engine.tokenizer`."""
        return self._call(lambda: self._engine.tokenizer)

    def get_tokenizer(self) -> TokenizerView:
        """Return `tokenizer`. This is vLLM's name for it."""
        return self.tokenizer

    def stream(
        self, prompt: Prompt | Ids | None = None, sampling_params: Sampling | None = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Yield the outputs of one or several prompts, piece by piece. See `Engine.stream`."""
        yield from self._iterate(self._engine.stream(prompt, sampling_params, **options))

    def serve(self, port: int = 0, *, host: str = "127.0.0.1") -> Any:
        """Start an HTTP server for this engine, and return it. It runs until its `close` is called or the engine ends.

        See `Engine.serve`.
        """
        return serve.http_server(self, host=host, port=port).__enter__()

    def open(
        self, prompt: str | Ids, sampling_params: Mapping[str, Any] | None = None, **options: Any
    ) -> SyncGeneration:
        """Return a generation that can be continued, forked, rewound and scored. See `Engine.open`."""
        return SyncGeneration(self, self._call(lambda: self._engine.open(prompt, sampling_params, **options)))

    def load(self, saved: Mapping[str, Any] | str | PathLike[str]) -> SyncGeneration:
        """Load a generation that `save` returned or wrote. See `Engine.load`."""
        return SyncGeneration(self, self._call(lambda: self._engine.load(saved)))

    def chat_stream(self, messages: Messages, **options: Any) -> Generator[Answer, None, None]:
        """Yield the answer to a chat in chunks. See `Engine.chat_stream`."""
        yield from self._iterate(self._engine.chat_stream(messages, **options))

    def _iterate(self, pieces: AsyncGenerator[Piece_, None]) -> Generator[Piece_, None, None]:
        """Yield the pieces of a stream. Closes the stream when the caller leaves its loop."""
        try:
            while True:
                try:
                    piece = self._call(pieces.__anext__)
                except StopAsyncIteration:
                    return
                yield piece
        # Ctrl-C may interrupt any line above, and the traceback then keeps this generator alive. Therefore the stream
        # is closed in `finally`.
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
            interrupt = KeyboardInterrupt("The call was aborted.")
            show_one_line(interrupt, f"KeyboardInterrupt: {ABORTED}")
            raise interrupt from None
        except BaseException:
            self._running.call(call.cancel)
            raise

    def _post(self, function: Callable[[], None]) -> None:
        """Schedule `function` on the engine's event loop without waiting. Calls run in the order of posting."""
        self._check_open()
        self._posted.append(function)
        loop = self._engine._loop
        if not self._woken and loop is not None:
            self._woken = True
            loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        self._woken = False  # set before the loop, so that a call posted during the loop wakes the event loop again
        try:
            while self._posted:
                self._posted.popleft()()
        finally:
            if self._posted:  # a call raised an error, which the event loop reports; run the remaining calls
                asyncio.get_running_loop().call_soon(self._run_posted)

    def _check_open(self) -> None:
        """Raise `EngineClosed` if the engine is closed. Starts an engine that has never been started."""
        _ = self._running

    def _begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a coroutine on the engine's event loop without waiting for it."""
        self._running.start_task_soon(function)

    async def _call_async(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the engine's event loop, and wait for the result on the caller's own loop."""
        loop_thread = self._loop_thread or await asyncio.to_thread(lambda: self._running)
        call = _Call(function)
        try:
            return await asyncio.wrap_future(loop_thread.start_task_soon(call.run))
        except asyncio.CancelledError:
            loop_thread.start_task_soon(_soon, call.cancel)
            raise

    async def _iterate_async(self, pieces: AsyncGenerator[Piece_, None]) -> AsyncGenerator[Piece_, None]:
        try:
            while True:
                try:
                    piece = await self._call_async(pieces.__anext__)
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            if self._loop_thread is not None:
                self._loop_thread.start_task_soon(_end, pieces)

    @property
    def _running(self) -> BlockingPortal:
        loop_thread = self._loop_thread
        if loop_thread is not None:
            return loop_thread
        with self._starting:
            if self._closed:
                raise EngineClosed("The engine is closed; `start` starts it again.")
            if self._loop_thread is None:
                self._start()
            if self._loop_thread is None:  # only for the type checker: `_start` sets it or raises
                raise EngineClosed("The engine is closed.")
            return self._loop_thread


class SyncGeneration:
    """A `Generation` for code without `await`."""

    def __init__(self, engine: SyncEngine, generation: Generation) -> None:
        self._engine = engine
        self._generation = generation

    @property
    def ids(self) -> list[int]:
        """All token ids, of the prompt and after it."""
        return self._generation.ids

    @property
    def text(self) -> str:
        """The text after the prompt."""
        return self._generation.text

    @property
    def finished(self) -> bool:
        """Whether the model ended the text."""
        return self._generation.finished

    @property
    def full_text(self) -> str:
        """The text of all tokens."""
        return self._generation.full_text

    @property
    def finish(self) -> Finish | None:
        """The reason why the last call ended, or None before the first call."""
        return self._generation.finish

    @property
    def num_prompt(self) -> int:
        """The number of tokens of the prompt."""
        return self._generation.num_prompt

    @property
    def num_cached(self) -> int:
        """The number of prompt tokens of the last call that came from the prefix cache."""
        return self._generation.num_cached

    def __len__(self) -> int:
        return len(self._generation)

    def __repr__(self) -> str:
        return f"Sync{self._generation!r}"

    def __iter__(self) -> Generator[Token, None, None]:
        return self.tokens()

    def tokens(self, max_new_tokens: int | None = None, **sampling: Any) -> Generator[Token, None, None]:
        """Yield further tokens. See `Generation.tokens`."""
        yield from self._engine._iterate(self._generation.tokens(max_new_tokens, **sampling))

    def generate(self, max_new_tokens: int | None = None, **sampling: Any) -> str:
        """Continue and return the new text. See `Generation.generate`."""
        return self._engine._call(partial(self._generation.generate, max_new_tokens, **sampling))

    def select(self, choices: Sequence[str], **options: Any) -> Choice:
        """Return the likeliest of several texts, and append it. See `Generation.select`."""
        return self._engine._call(partial(self._generation.select, choices, **options))

    def score(self, text_or_ids: str | Sequence[int]) -> Score:
        """Return the log-probability of a text as the continuation. See `Generation.score`."""
        return self._engine._call(partial(self._generation.score, text_or_ids))

    def fork(self, n: int = 1) -> list[SyncGeneration]:
        """Return `n` independent copies. See `Generation.fork`."""
        return [SyncGeneration(self._engine, each) for each in self._generation.fork(n)]

    def rewind(self, n: int) -> None:
        """Remove the last `n` tokens. See `Generation.rewind`."""
        self._engine._call(partial(self._generation.rewind, n))

    def append(self, text_or_ids: str | Sequence[int]) -> None:
        """Append a text or token ids. See `Generation.append`."""
        self._engine._call(partial(self._generation.append, text_or_ids))

    def tool(self, function: Callable[[], Result], **options: Any) -> Result:
        """Call `function`, and keep the KV cache pages in the cache meanwhile. See `Generation.tool`."""
        done: Future[None] = Future()
        waiting = self._engine._running.start_task_soon(
            lambda: self._generation.tool(asyncio.wrap_future(done), **options)
        )
        try:
            return function()
        finally:
            done.set_result(None)
            waiting.result()

    def save(self, path: str | PathLike[str] | None = None) -> dict[str, Any]:
        """Return the generation as JSON values, and write them to `path` if given. See `Generation.save`."""
        return self._generation.save(None if path is None else fspath(path))

    def _repr_html_(self) -> str:
        return self._engine._call(self._generation._repr_html_)


class _Call:
    """One call on the engine's event loop. `cancel` also works before the call starts."""

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


async def _soon(function: Callable[[], None]) -> None:
    function()


async def _end(pieces: AsyncGenerator[Any, None]) -> None:
    """Close the generator, even if a cancelled step of it is still running."""
    while True:
        try:
            await pieces.aclose()
            return
        except RuntimeError:  # the generator is still running
            await asyncio.sleep(0)
