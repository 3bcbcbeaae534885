"""Programs: functions that add parts to a state. They run alone, in batches, or as streams."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event, Semaphore, Thread
from typing import Any

from ops.progress import shown_bar
from runtime.errors import InvalidRequest
from serve.lang.expressions import Expression
from serve.lang.state import Close, ProgramState, new_state
from serve.python.arguments import divided
from serve.python.engine import Engine as AsyncEngine
from serve.python.sync_engine import SyncEngine

MAX_THREADS = 96
CHECK_S = 1.0  # seconds between two checks that the engine is still open
MAX_PROGRAMS = 1024  # programs of a batch that run at the same time

_default: list[SyncEngine] = []  # the engine of `set_default_backend`


class Engine(SyncEngine):
    """An engine with the behaviour of SGLang's `Engine`: the constructor loads the model, and methods block."""

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        super().__init__(model_path, **options)
        self.start()


Runtime = Engine


def set_default_backend(backend: Any) -> None:
    """Set the engine of programs that are run without `backend`.

    Raises `InvalidRequest` unless it is an `Engine` of this module or another `SyncEngine`: only an engine in this
    process can share the prefixes of programs.
    """
    if not isinstance(backend, SyncEngine):
        raise InvalidRequest(
            f"{type(backend).__name__} cannot run programs; use penstock.lang.Engine(model_path=...), which runs in "
            "this process.",
            param="backend",
        )
    _default[:] = [backend]


def default_backend() -> SyncEngine:
    """Return the engine of `set_default_backend`. Raises `InvalidRequest` if none was set."""
    if not _default:
        raise InvalidRequest("No engine was chosen: call set_default_backend(Engine(...)), or give backend=.")
    return _default[0]


def function(program: Callable[..., Any] | None = None, **defaults: Any) -> Any:
    """Make a program from a function whose first parameter is the state: `@function def f(s, question): ...`.

    SGLang's option `num_api_spec_tokens`, which concerns the APIs of other providers, is refused.
    """
    if defaults:
        raise InvalidRequest(f"function has no option {', '.join(defaults)} here.", param=next(iter(defaults)))
    return Program if program is None else Program(program)


class Program:
    """A function that adds parts to a state. Another program may call it with its own state."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self.__name__ = getattr(program, "__name__", "program")
        self.__doc__ = program.__doc__
        self._names = [*inspect.signature(program).parameters][1:]
        self._bound: dict[str, Any] = {}

    def bind(self, **arguments: Any) -> Program:
        """Return the program with some arguments fixed."""
        bound = Program(self._program)
        bound._bound = {**self._bound, **arguments}
        return bound

    def __call__(self, state: ProgramState, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(state, ProgramState):
            raise InvalidRequest(f"{self.__name__} is a program: call {self.__name__}.run(...).")
        return self._program(state, *arguments, **{**self._bound, **keywords})

    def run(
        self, *arguments: Any, backend: SyncEngine | None = None, stream: bool = False, **keywords: Any
    ) -> ProgramState:
        """Run the program, and return its state.

        Keywords are the program's arguments, and sampling parameters for every `gen`. If `stream` is true, the program
        runs in a thread, and `state.text_iter()` yields new text as it is generated. Raises the error of the program.
        """
        if inspect.iscoroutinefunction(self._program):
            raise InvalidRequest(f"{self.__name__} is an async program: `await {self.__name__}.arun(...)`.")
        engine = backend or default_backend()
        mine, sampling = self._divided(keywords)
        state, close = new_state(engine, sampling, streamed=stream)

        def work() -> None:
            try:
                self._add(state, arguments, mine)
                state.sync()
            except BaseException as error:
                engine._call(partial(close, error))
                raise

        if not stream:
            work()
            state._raise()
            return state

        def work_and_tell() -> None:
            try:
                work()
            except Exception as error:  # the reader of the stream gets the error
                state._executor.error = state._executor.error or error
            finally:
                if state._events is not None:
                    state._events.put(None)

        Thread(target=work_and_tell, name=f"penstock-{self.__name__}", daemon=True).start()
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        backend: SyncEngine | None = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run the program once for each set of arguments, concurrently, and return the states in order.

        If a program fails, the others continue. Reading the failed program's state raises its error, and
        `state.error()` returns the error.
        """
        engine = backend or default_backend()
        if not batch:
            return []
        auto = max(MAX_THREADS, 16 * (os.cpu_count() or 1))
        count = min(len(batch), auto if isinstance(num_threads, str) else num_threads)
        limit = MAX_PROGRAMS if isinstance(num_threads, str) else count
        _, shared = self._divided(sampling)

        with _progress(len(batch), shown=progress_bar) as advance:
            running = _Running(engine, limit, len(batch), advance)

            def one(arguments: Mapping[str, Any]) -> ProgramState:
                state = running.new_state(shared)
                try:
                    self._add(state, (), arguments)
                except Exception as error:
                    running.fail(state, error)
                running.end_when_done(state)
                return state

            # A thread runs one program's function, and does not wait for the parts that the function queued.
            threads = ThreadPoolExecutor(count, thread_name_prefix="penstock-program")
            try:
                started: list[Future[ProgramState]] = []
                for arguments in batch:
                    running.wait_for_room()
                    started.append(threads.submit(one, arguments))
                states = [each.result() for each in started]
                running.wait_until_done()
                return states
            except BaseException:  # interrupted: end the running programs, and start no more
                threads.shutdown(wait=False, cancel_futures=True)
                running.close()
                raise
            finally:
                threads.shutdown()

    async def arun(self, engine: AsyncEngine, *arguments: Any, **keywords: Any) -> ProgramState:
        """Run an `async def` program on an engine of the running event loop, and return its state.

        Cancelling the call aborts its requests. Raises the error of the program.
        """
        mine, sampling = self._divided(keywords)
        state, close = new_state(engine, sampling)
        try:
            added = self._program(state, *arguments, **{**self._bound, **mine})
            if inspect.isawaitable(added):
                await added
            await state.sync_async()
        except BaseException:
            await close()
            raise
        state._raise()
        return state

    def _add(self, state: ProgramState, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        result = self._program(state, *arguments, **{**self._bound, **keywords})
        if isinstance(result, Expression):
            state += result
        else:
            state.ret_value = result

    def _divided(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (the program's arguments, sampling parameters). Raises `InvalidRequest` for unknown keywords."""
        mine = {name: value for name, value in keywords.items() if name in self._names}
        others = {name: value for name, value in keywords.items() if name not in self._names}
        sampling, fields = divided(None, others)
        if fields:
            raise InvalidRequest(f"A program has no option {next(iter(fields))}.", param=next(iter(fields)))
        return mine, sampling


class _Running:
    """The running programs of one batch of `total` programs. At most `limit` of them run at the same time."""

    def __init__(self, engine: SyncEngine, limit: int, total: int, on_end: Callable[[], object]) -> None:
        self._engine = engine
        self._num_left = total  # number of programs that have not ended; only the event loop changes it
        self._on_end = on_end
        self._room = Semaphore(limit)
        self._closers: dict[ProgramState, Close] = {}
        self._done = Event()
        self._closed = False

    def wait_for_room(self) -> None:
        """Wait until fewer than `limit` programs run. Raises `EngineClosed` if the engine ends first."""
        while not self._room.acquire(timeout=CHECK_S):
            self._engine._check_open()

    def new_state(self, sampling: Mapping[str, Any]) -> ProgramState:
        """Return the state of a new program. Raises `InvalidRequest` after `close`."""
        state, close = new_state(self._engine, sampling)
        self._closers[state] = close
        if self._closed:  # checked after the state is registered, so that `close` ends every program
            raise InvalidRequest("The program was aborted.")
        return state

    def fail(self, state: ProgramState, error: Exception) -> None:
        """End a program whose function raised an error."""
        self._engine._call(partial(self._closers[state], error))
        state._unsent.clear()
        state._executor.error = error

    def end_when_done(self, state: ProgramState) -> None:
        """Count a program as ended once all its parts are done. Returns immediately."""
        self._engine._post(partial(state._call_when_done, self._end))

    def _end(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._done.set()
        self._room.release()
        self._on_end()

    def wait_until_done(self) -> None:
        """Wait until all parts of all programs are done. Raises `EngineClosed` if the engine ends first."""
        while not self._done.wait(CHECK_S):
            self._engine._check_open()

    def close(self) -> None:
        """End all programs immediately, and let no further program start."""
        self._closed = True
        for close in [*self._closers.values()]:
            self._engine._call(close)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Show a progress bar of finished programs. Yields a function that advances the bar by one program."""
    if not shown:
        yield lambda: None
        return
    with shown_bar(total, "Programs", unit="program") as bar:
        yield bar.update
