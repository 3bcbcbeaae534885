"""The state of a program: the text so far, and the variables. It is the first argument of the program's function."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

from runtime.errors import InvalidRequest
from serve.lang.executor import Executor
from serve.lang.expressions import Expression, Gen, Parts, Role, RoleBegin, RoleEnd, Select
from serve.python.engine import Engine
from serve.python.sync_engine import SyncEngine

Event = tuple[str | None, str, Mapping[str, Any] | None]
Close = Callable[..., Coroutine[Any, Any, None]]  # `Executor.close`


class ProgramState:
    """The state of a running program.

    `s += part` queues a part. Reading `s["name"]`, `s.text()` or `s.messages()` waits for the queued parts. An `async
    def` program uses `await s.get("name")` or `await s.sync_async()` instead. If a part failed, reading raises its
    error.
    """

    def __init__(
        self,
        executor: Executor,
        call: Callable[[Callable[[], Any]], Any] | None,
        post: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._executor = executor
        self._post = post  # calls a function on the engine's event loop, without waiting for it
        self._call = call  # calls it and waits for the result; None on the engine's own loop
        self._events: queue.Queue[Event | None] | None = None
        self._unsent: deque[Expression | str] = deque()  # parts that are not yet sent to the event loop
        self.ret_value: Any = None  # the value that the program returned

    # --- adding ---

    def __iadd__(self, part: Expression | str | None) -> Self:
        if part is not None:
            if not isinstance(part, Expression | str):
                raise InvalidRequest(f"A program is made of texts and expressions, not of {type(part).__name__}.")
            self._unsent.append(part)
            if self._call is None:
                self._send()
            elif self._post is not None and _generates(part):  # generate while the program's function continues
                self._post(self._send)
        return self

    def _send(self) -> None:
        """Send the unsent parts to the executor. Runs on the event loop."""
        while self._unsent:
            self._executor.submit(self._unsent[0])
            self._unsent.popleft()  # after `submit`, so that `_idle`, on another thread, is not true too early

    @property
    def _idle(self) -> bool:
        return not self._unsent and self._executor.idle

    def _call_when_done(self, function: Callable[[], object]) -> None:
        """Send the unsent parts to the executor, and call `function` on the event loop when all parts are done."""
        self._send()
        self._executor.call_when_done(function)

    async def _done(self) -> None:
        self._send()
        await self._executor.when_done()

    @contextmanager
    def _message(self, role: Role) -> Iterator[None]:
        self += RoleBegin(role)
        yield
        self += RoleEnd(role)

    def system(self, content: Expression | str | None = None) -> Any:
        """Add a system message. Without `content`, return a context manager, whose block adds the message's parts."""
        return self._role("system", content)

    def user(self, content: Expression | str | None = None) -> Any:
        """Add a user message. Without `content`, return a context manager, whose block adds the message's parts."""
        return self._role("user", content)

    def assistant(self, content: Expression | str | None = None) -> Any:
        """Add an assistant message. Without `content`, return a context manager, whose block adds its parts."""
        return self._role("assistant", content)

    def _role(self, role: Role, content: Expression | str | None) -> Any:
        if content is None:
            return self._message(role)
        self += RoleBegin(role)
        self += content
        self += RoleEnd(role)
        return None

    # --- reading ---

    def __getitem__(self, name: str) -> Any:
        self.sync()
        return self._variable(name)

    get_var = __getitem__

    def __setitem__(self, name: str, value: Any) -> None:
        self.sync()
        self._executor.variables[name] = value

    def __contains__(self, name: str) -> bool:
        self.sync()
        return name in self._executor.variables

    def get_meta_info(self, name: str) -> Any:
        """Return the token counts and finish reason of a `gen`, or the scores of a `select`."""
        self.sync()
        self._raise()
        return self._executor.meta_info.get(name)

    def text(self) -> str:
        """Return the whole text of the program, including prompts and outputs."""
        self.sync()
        self._raise()
        return self._executor.text

    def messages(self) -> list[dict[str, str]]:
        """Return the messages so far, each with `role` and `content`."""
        self.sync()
        self._raise()
        return self._executor.messages

    def error(self) -> BaseException | None:
        """Return the error of the first part that failed, or None."""
        self.sync()
        return self._executor.error

    def sync(self) -> None:
        """Wait until all queued parts are done."""
        if self._call is None:
            if self._executor._task is not None and not self._executor._task.done():
                raise InvalidRequest("An async program must await: `await s.get(name)` or `await s.sync_async()`.")
            return
        if not self._idle:
            self._call(self._done)

    async def sync_async(self) -> Self:
        """Wait until all queued parts are done, in an async program."""
        await self._executor.when_done()
        return self

    async def get(self, name: str) -> Any:
        """Return a variable when all queued parts are done, in an async program."""
        await self._executor.when_done()
        return self._variable(name)

    def _variable(self, name: str) -> Any:
        self._raise()
        if name not in self._executor.variables:
            known = ", ".join(self._executor.variables) or "none"
            raise KeyError(f"The program has no variable {name!r}; it has {known}.")
        return self._executor.variables[name]

    def _raise(self) -> None:
        if self._executor.error is not None:
            raise self._executor.error

    # --- streaming ---

    def text_iter(self, var_name: str | None = None) -> Generator[str, None, None]:
        """Yield new text of one variable, or of the whole program, as it is generated.

        If the program was not run with `stream=True`, yield the whole text at once.
        """
        if self._events is None:
            yield self.text() if var_name is None else self[var_name]
            return
        while (event := self._events.get()) is not None:
            name, text, _ = event
            if var_name is None or name == var_name:
                yield text
        self._raise()

    async def text_async_iter(self, var_name: str | None = None) -> AsyncGenerator[str, None]:
        """Yield new text like `text_iter`, for async code: the caller's event loop is not blocked."""
        if self._events is None:
            yield await asyncio.to_thread(self.text if var_name is None else lambda: self[var_name])
            return
        while (event := await asyncio.to_thread(self._events.get)) is not None:
            name, text, _ = event
            if var_name is None or name == var_name:
                yield text
        self._raise()

    # --- forking ---

    def fork(self, size: int = 1, position_ids_offset: None = None) -> ProgramStateGroup:
        """Return `size` copies of this state, which share its text as a cached prefix and run concurrently."""
        if size < 1:
            raise InvalidRequest(f"fork makes at least one copy, not {size}.", param="size")
        if position_ids_offset is not None:
            raise InvalidRequest("position_ids_offset is not supported; leave it out.", param="position_ids_offset")
        self.sync()
        self._raise()
        return ProgramStateGroup(
            [ProgramState(self._copied(number), self._call, self._post) for number in range(size)], self
        )

    def copy(self) -> ProgramStateGroup:
        """Return one copy, as a group for a `with` block."""
        return self.fork(1)

    def _copied(self, number: int) -> Executor:
        copied = self._executor.copied() if self._call is None else self._call(self._executor.copied)
        copied.branch(number + 1)
        return copied

    def __repr__(self) -> str:
        return f"ProgramState({self._executor.text[:80]!r})"


def _generates(part: Expression | str) -> bool:
    if isinstance(part, Parts):
        return any(_generates(each) for each in part.parts)
    return isinstance(part, Gen | Select)


class ProgramStateGroup:
    """The copies that `fork` returned. `join` waits for all of them."""

    def __init__(self, states: list[ProgramState], source: ProgramState) -> None:
        self.states = states
        self._source = source

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Wait for all copies, and add their results to the original state.

        `mode` "gather_variable": each variable that the copies set becomes a list with one value per copy.
        "concate_and_append": the new texts of the copies are appended, in order.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise InvalidRequest(f"There is no mode {mode!r} of join.", param="mode")
        texts = [state.text() for state in self.states]
        source = self._source
        if mode == "concate_and_append":
            length = len(source.text())
            for text in texts:
                source += text[length:]
            return
        known = {*source._executor.variables}
        for name in {name for state in self.states for name in state._executor.variables} - known:
            source._executor.variables[name] = [state._executor.variables.get(name) for state in self.states]

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        if self.states[index] is not state:  # `forks[0] += part` assigns the same state
            raise InvalidRequest("A copy cannot be replaced.")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, part: Any) -> Self:
        """Add a part to every copy.

        `part` is one part for all copies, a list with one part per copy, or a function of the copy's number.
        """
        for number, state in enumerate(self.states):
            mine: Any = part(number) if callable(part) else part[number] if isinstance(part, list) else part
            state += mine
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.join()


def new_state(
    engine: Engine | SyncEngine, sampling: Mapping[str, Any], *, streamed: bool = False
) -> tuple[ProgramState, Close]:
    """Return the state of a new program, and a coroutine function that ends the program."""
    if not isinstance(engine, SyncEngine):
        executor = Executor(engine, sampling)
        return ProgramState(executor, None), executor.close
    events: queue.Queue[Event | None] | None = queue.Queue() if streamed else None
    executor = Executor(engine._engine, sampling, emit=None if events is None else lambda *event: events.put(event))
    state = ProgramState(executor, engine._call, engine._post)
    state._events = events
    return state, executor.close
