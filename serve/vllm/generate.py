"""Call the engine with vLLM's prompts and parameters. `LLM`, `LLMEngine` and `AsyncLLM` share this code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from os.path import realpath
from typing import Any, Self

from ops.progress import shown_bar
from runtime.errors import InvalidRequest
from runtime.sampling_params import MAX_CHOICES
from serve.python.results import Generated, Piece
from serve.python.sampling import RequestOutputKind, SamplingParams
from serve.python.sync_engine import SyncEngine
from serve.vllm.arguments import EngineSettings
from serve.vllm.logits_processors import hook_of
from serve.vllm.outputs import CompletionOutput, RequestOutput, completion_output, logprobs_of, request_output
from serve.vllm.prompts import LoRARequest

MAX_PROMPTS = 1024  # prompts in one call to the engine
MAX_OUTPUTS = 4096
DEFAULT_TOKENS = 16  # vLLM's default for max_tokens

Params = Mapping[str, Any] | None


def with_defaults(params: Params) -> SamplingParams:
    """Return a copy of the parameters, with vLLM's default for `max_tokens`."""
    made = params.clone() if isinstance(params, SamplingParams) else SamplingParams(**(params or {}))
    if "max_new_tokens" not in made:
        made["max_new_tokens"] = DEFAULT_TOKENS
    return made


class Caller:
    """Sends vLLM's requests to an engine, with the logits processors that run for each request."""

    def __init__(self, engine: SyncEngine, logits_processors: Sequence[Any] = ()) -> None:
        self.engine = engine
        self._processors = logits_processors
        self._loading = asyncio.Lock()  # held while an adapter is loaded
        self._starting: set[str] = set()  # ids of requests that wait for their adapter to be loaded
        self._aborted: set[str] = set()  # ids in `_starting` whose request was aborted

    @classmethod
    def started(cls, settings: EngineSettings) -> Self:
        """Start an engine with these settings."""
        return cls(settings.start(), settings.logits_processors)

    # --- whole outputs ---

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: Sequence[Params],
        *,
        progress: bool,
        loras: Sequence[Any],
        priorities: Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Generate from all prompts concurrently. Returns one output per prompt, in order."""
        tokenizer = self.engine.get_tokenizer()
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        names = [self.adapter(lora) for lora in loras]
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        groups = _groups(params, names, alone=bool(self._processors))

        async def run(group: list[int]) -> None:
            made = with_defaults(params[group[0]])
            fields: dict[str, Any] = {"on_logits": hook_of(self._processors, made, ids[group[0]])}
            if names[group[0]] is not None:
                fields["lora_path"] = names[group[0]]
            if priorities is not None:
                fields["priority"] = [priorities[index] for index in group]
            answers: list[Generated] = await self.engine._engine.generate(
                input_ids=[ids[index] for index in group],
                sampling_params=made,
                progress=progress and len(groups) == 1,
                **fields,
            )
            n = len(answers) // len(group)
            for place, index in enumerate(group):
                mine = answers[place * n : (place + 1) * n]
                outputs[index] = request_output(prompts[index], ids[index], mine, made, loras[index])

        async def run_all() -> None:
            with prompts_counted(len(prompts), shown=progress and len(groups) > 1) as done:
                tasks = [asyncio.ensure_future(run(group)) for group in groups]
                for task, group in zip(tasks, groups, strict=True):
                    task.add_done_callback(partial(_count, done, len(group)))
                try:
                    await asyncio.gather(*tasks)
                finally:  # after an error, cancel the remaining calls
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)

        if prompts:
            self.engine._call(run_all)
        return [output for output in outputs if output is not None]

    # --- streams ---

    async def stream(
        self, request_id: str, prompt: str | list[int], params: Params, *, lora: Any = None, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt while they are generated. Runs on the engine's event loop.

        By default, each yielded output has all text so far. `params.output_kind` can request only the new text, or one
        output at the end.
        """
        engine, made = self.engine._engine, with_defaults(params)
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        fields: dict[str, Any] = {"rid": request_id, "on_logits": hook_of(self._processors, made, ids)}
        growing = _Growing(request_id, prompt, ids, made, lora)
        self._starting.add(request_id)
        try:
            name = await self._load(lora)
            if request_id in self._aborted:
                yield growing.aborted()
                return
        finally:
            self._starting.discard(request_id)
            self._aborted.discard(request_id)
        if name is not None:
            fields["lora_path"] = name
        if priority:
            fields["priority"] = priority
        async with aclosing(engine.stream(input_ids=ids, sampling_params=made, **fields)) as pieces:
            async for piece in pieces:
                output = growing.with_piece(piece)
                if output is not None:
                    yield output

    def abort(self, request_id: str) -> None:
        """Abort a request, even if its adapter is still being loaded. Runs on the engine's event loop."""
        if request_id in self._starting:
            self._aborted.add(request_id)
        else:
            self.engine._engine.core.abort_label(request_id, exact=True)

    # --- adapters ---

    def adapter(self, lora: Any) -> str | None:
        """Return the name of a request's LoRA adapter, or None.

        If `lora` is a `LoRARequest` with a path whose adapter is not loaded yet, load it.
        """
        return None if lora is None else self.engine._call(lambda: self._load(lora))

    async def _load(self, lora: Any) -> str | None:
        name = getattr(lora, "lora_name", lora)
        path = lora.lora_path if isinstance(lora, LoRARequest) else None
        if name is None or path is None:
            return name
        async with self._loading:
            loaded = {adapter.name: adapter.path for adapter in self.engine._engine.core.adapters.adapters}
            if name in loaded and not _same_folder(loaded[name], path):
                raise InvalidRequest(
                    f"The adapter {name} was loaded from {loaded[name]}; give the one of {path} another name.",
                    param="lora_request",
                )
            if name not in loaded:
                answer = await self.engine._engine.load_lora_adapter(name, path)
                if not answer["success"]:
                    raise InvalidRequest(answer["error_message"], param="lora_request")
        return name


class _Growing:
    """Builds the outputs of one prompt from the pieces of a stream."""

    def __init__(
        self, request_id: str, prompt: str | list[int], ids: list[int], params: SamplingParams, lora: Any
    ) -> None:
        self._params = params
        self._kind = params.output_kind or RequestOutputKind.CUMULATIVE
        self._output = RequestOutput(
            request_id, prompt if isinstance(prompt, str) else None, ids, None, [], finished=False, lora_request=lora
        )
        self._outputs: dict[int, CompletionOutput] = {}

    def aborted(self) -> RequestOutput:
        """Return the output of a request that was aborted before it began."""
        outputs = [CompletionOutput(index, "", [], None, None, "abort", None) for index in range(self._params.n)]
        return replace(self._output, outputs=outputs, finished=True)

    def with_piece(self, piece: Piece) -> RequestOutput | None:
        """Return the output after this piece, or None if `output_kind` allows only the final output."""
        params, old = self._params, self._outputs.get(piece.index)
        new = completion_output(piece.index, piece, params)
        if old is not None and new.logprobs is not None:  # the sum covers all tokens, whatever the `output_kind`
            new.cumulative_logprob = (old.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
        if old is not None and self._kind is not RequestOutputKind.DELTA:
            new.token_ids = old.token_ids + new.token_ids
            if new.logprobs is not None:
                new.logprobs = (old.logprobs or []) + new.logprobs
        if self._kind is RequestOutputKind.DELTA:
            new.text = piece.delta
        self._outputs[piece.index] = new
        finished = len(self._outputs) == params.n and all(each.finished() for each in self._outputs.values())
        prompt_logprobs = logprobs_of(piece.meta_info, "input", params.prompt_logprobs)
        output = self._output
        if prompt_logprobs:
            output.prompt_logprobs = prompt_logprobs
        if self._kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        shown = [new] if self._kind is RequestOutputKind.DELTA else [self._outputs[i] for i in sorted(self._outputs)]
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            output.prompt_logprobs,
            shown,
            finished=finished,
            num_cached_tokens=piece.meta_info["cached_tokens"],
            lora_request=output.lora_request,
        )


def _same_folder(one: str, other: str) -> bool:
    return realpath(one) == realpath(other)


def _groups(params: Sequence[Params], names: Sequence[str | None], *, alone: bool) -> list[list[int]]:
    """Group the prompts' indices into calls of the engine, each with equal parameters and a limited number of outputs.

    If `alone` is true, each prompt has its own call.
    """
    if alone:
        return [[index] for index in range(len(params))]
    groups: dict[tuple[int, str | None], list[int]] = {}
    for index, each in enumerate(params):
        groups.setdefault((id(each), names[index]), []).append(index)
    several = any(each and (each.get("n") or 1) > 1 for each in params)
    most = max(1, MAX_OUTPUTS // MAX_CHOICES) if several else MAX_PROMPTS
    return [group[first : first + most] for group in groups.values() for first in range(0, len(group), most)]


def _count(done: Callable[[int], object], count: int, task: asyncio.Future[None]) -> None:
    done(count)


@contextmanager
def prompts_counted(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar of finished prompts. Yields a function that advances the bar by a number of prompts."""
    if not shown:
        yield lambda count: None
        return
    with shown_bar(total, "Prompts", unit="prompt") as bar:
        yield bar.update
