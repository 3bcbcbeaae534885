"""Run the expressions of one program, in order, on the engine's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from runtime.errors import InvalidRequest
from serve.lang.expressions import Expression, Gen, Parts, RoleBegin, RoleEnd, Select
from serve.python.engine import Engine
from serve.python.generation import Generation

# Text before and after a message if the model has no chat template, as in SGLang's default template.
PLAIN_ROLES: Mapping[str, tuple[str, str]] = {
    "system": ("SYSTEM:", "\n"),
    "user": ("USER:", "\n"),
    "assistant": ("ASSISTANT:", "\n"),
}
Emit = Callable[[str | None, str, Mapping[str, Any] | None], None]


class Executor:
    """Runs the parts (texts and expressions) of one program, and holds its text and variables.

    Parts wait in a queue, and one task runs them in order. `when_done` waits until the queue is empty. If a part fails,
    its error is stored in `error`, and the rest of the queue is dropped. All methods run on the engine's event loop.
    """

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], emit: Emit | None = None) -> None:
        self._engine = engine
        self._sampling = dict(sampling)
        self._emit = emit
        self._queue: deque[Expression | str] = deque()
        self._task: asyncio.Task[None] | None = None
        self._generation: Generation | None = None  # None until something is generated
        self._pending = ""  # text that is not yet encoded and appended to the generation
        self._role: str | None = None
        self._content = ""  # content of the open message
        self._copies: WeakSet[Executor] = WeakSet()
        self._closed = False
        self.text = ""
        self.messages: list[dict[str, str]] = []
        self.variables: dict[str, Any] = {}
        self.meta_info: dict[str, Any] = {}
        self.error: BaseException | None = None

    def submit(self, part: Expression | str) -> None:
        """Add a part to the queue. Does nothing after `close`."""
        if self._closed:
            return
        self._queue.extend(part.parts if isinstance(part, Parts) else (part,))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    @property
    def idle(self) -> bool:
        """Whether all queued parts are done. Any thread may read this property."""
        return not self._queue and (self._task is None or self._task.done())

    def call_when_done(self, function: Callable[[], object]) -> None:
        """Call `function` on the event loop when all queued parts are done."""
        if self._task is None or self._task.done():
            function()
        else:
            self._task.add_done_callback(lambda _: function())

    async def when_done(self) -> None:
        """Return when all queued parts are done. If a part fails, its error is in `error` and is not raised here."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self, error: BaseException | None = None) -> None:
        """End this executor and its copies immediately. Aborts the running generation, and sets `error`."""
        self._closed = True
        self.error = self.error or error or InvalidRequest("The program was aborted.")
        self._queue.clear()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for copy in [*self._copies]:
            await copy.close(error)

    def copied(self) -> Executor:
        """Return a copy that continues from the current state. Call it when all parts are done."""
        copy = Executor(self._engine, self._sampling)
        copy._closed = self._closed
        self._copies.add(copy)
        copy._generation = None if self._generation is None else self._generation.fork(1)[0]
        copy._pending, copy._role, copy._content = self._pending, self._role, self._content
        copy.text, copy.messages = self.text, [dict(message) for message in self.messages]
        copy.variables, copy.meta_info = dict(self.variables), dict(self.meta_info)
        return copy

    def branch(self, number: int) -> None:
        """Give this copy its own seed, so that it samples differently from the other copies of its source."""
        if self._generation is not None:
            self._generation._branch = self._generation._branch * 31 + number
        elif self._sampling.get("seed") is not None:
            self._sampling["seed"] += 7919 * number

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._run(self._queue.popleft())
        except asyncio.CancelledError:
            self.error = self.error or InvalidRequest("The program was aborted.")
            raise
        except Exception as error:  # raised later, by the code that reads a variable, so that other programs continue
            self.error = error
            self._queue.clear()

    async def _run(self, part: Expression | str) -> None:
        if isinstance(part, str):
            self._add(part)
        elif isinstance(part, RoleBegin):
            self._begin(part.role)
        elif isinstance(part, RoleEnd):
            self._end(part.role)
        elif isinstance(part, Gen):
            await self._gen(part)
        elif isinstance(part, Select):
            chosen = await self._ready().select(part.choices, method=part.method)
            meta = {
                "scores": chosen.scores,
                "normalized_prompt_logprobs": [*chosen.scores.values()],
                "input_token_logprobs": [
                    [(token.logprob, token.id, token.text) for token in tokens] for tokens in chosen.tokens.values()
                ],
            }
            self._set(part.name, str(chosen), meta)
            self._grow(str(chosen))
            self._tell(part.name, str(chosen), meta)
        elif isinstance(part, Parts):
            for each in part.parts:
                await self._run(each)
        else:
            raise InvalidRequest(f"{type(part).__name__} is not a part of a program.")

    # --- text and messages ---

    def _add(self, text: str) -> None:
        if self.messages and self._role is None and text.strip():
            raise InvalidRequest("Text after messages must be in a message: system(), user() or assistant().")
        if self._role in (None, "assistant"):
            self._pending += text
        self._grow(text)
        self._tell(None, text, None)

    def _grow(self, text: str) -> None:
        if self._role is not None:
            self._content += text
        if self._role in (None, "assistant"):
            self.text += text

    def _begin(self, role: str) -> None:
        if self._role is not None:
            raise InvalidRequest(f"A {role} message begins inside a {self._role} message.")
        if self.text and not self.messages and self.text.strip():
            raise InvalidRequest("Messages must come first; put the text before them into a system message.")
        self._role, self._content = role, ""
        if role == "assistant":
            self._restart(self._rendered())

    def _end(self, role: str) -> None:
        if self._role != role:
            raise InvalidRequest(f"A {role} message ends, but {self._role or 'no'} message is open.")
        self.messages.append({"role": role, "content": self._content})
        self._role = None
        if role != "assistant":
            self.text = self._rendered(opened=False)

    def _rendered(self, *, opened: bool = True) -> str:
        """Return the prompt of all messages so far. `opened`: append the beginning of the model's answer."""
        tokenizer = self._engine.tokenizer
        if tokenizer.has_chat_template:
            return tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=opened)
        texts = [PLAIN_ROLES[m["role"]][0] + m["content"] + PLAIN_ROLES[m["role"]][1] for m in self.messages]
        return "".join(texts) + (PLAIN_ROLES["assistant"][0] if opened else "")

    def _restart(self, text: str) -> None:
        """Replace the whole text. Its common prefix with the old text is still in the prefix cache."""
        special = not self._engine.tokenizer.has_chat_template
        ids = self._engine.tokenizer.encode(text, add_special_tokens=special)
        self._generation = self._engine.open(ids, self._sampling)
        self.text, self._pending = text, ""

    # --- generating ---

    def _ready(self) -> Generation:
        """Append the text collected so far to the generation, and return the generation."""
        if self._role not in (None, "assistant"):
            raise InvalidRequest(f"A {self._role} message cannot be generated; use assistant().")
        if self.messages and self._role is None:
            raise InvalidRequest("After messages, gen and select must be in an assistant() message.")
        if self._generation is None:
            if not self._pending:
                raise InvalidRequest("A program must begin with a text.")
            self._generation = self._engine.open(self._pending, self._sampling)
        elif self._pending:
            self._generation.append(self._pending)
        self._pending = ""
        return self._generation

    async def _gen(self, part: Gen) -> None:
        generation = self._ready()
        if part.n > 1 or part.options:
            await self._gen_whole(part, generation)
            return
        start = len(generation.ids)
        if self._emit is not None:
            text = ""
            async for token in generation.tokens(**part.sampling):
                self._tell(part.name, token.text, None)
                text += token.text
        else:
            text = await generation.generate(**part.sampling)
        finish = generation.finish
        self._set(
            part.name,
            text,
            {
                "finish_reason": None if finish is None else {"type": finish.kind, "matched": finish.matched},
                "prompt_tokens": start,
                "completion_tokens": len(generation.ids) - start,
                "cached_tokens": generation.num_cached,
            },
        )
        self._grow(text)

    async def _gen_whole(self, part: Gen, generation: Generation) -> None:
        """Run a `gen` with several outputs or with request fields, which a `Generation` does not support."""
        sampling = {**self._sampling, **part.sampling, "n": part.n}
        empty = sampling.get("max_new_tokens") == 0  # only log-probabilities of the next token are wanted
        if empty:
            sampling["max_new_tokens"] = 1
        answers = await self._engine.generate(input_ids=[generation.ids], sampling_params=sampling, **part.options)
        texts = ["" if empty else answer.text for answer in answers]
        metas = [answer.meta_info for answer in answers]
        if part.n == 1:
            self._set(part.name, texts[0], metas[0])
        else:
            self._set(part.name, texts, metas)
        generation.append(texts[0])
        self._grow(texts[0])
        self._tell(part.name, texts[0], metas[0])

    def _set(self, name: str | None, value: Any, meta: Any) -> None:
        if name is not None:
            self.variables[name] = value
            self.meta_info[name] = meta

    def _tell(self, name: str | None, text: str, meta: Mapping[str, Any] | None) -> None:
        if self._emit is not None and text:
            self._emit(name, text, meta)
