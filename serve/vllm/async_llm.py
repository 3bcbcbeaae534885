"""`AsyncLLM`: vLLM's interface for async code, on Penstock's engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from runtime.errors import InvalidRequest
from serve.python.sync_engine import SyncEngine
from serve.python.tokens import TokenizerView
from serve.vllm.arguments import EngineArgs, EngineSettings
from serve.vllm.generate import Caller
from serve.vllm.outputs import RequestOutput
from serve.vllm.prompts import prompt_of

MODES = {"abort": "abort", "wait": "wait", "keep": "in_place"}  # vLLM's modes of a pause -> Penstock's


class AsyncLLM:
    """An engine for async code, with vLLM's interface.

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="..."))
        async for output in engine.generate("Hello", SamplingParams(max_tokens=16), "request-1"):
            print(output.outputs[0].text)
        engine.shutdown()

    The engine runs on its own event loop in its own thread. Code on any event loop may call it.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an engine with these arguments. Blocks until the model is loaded."""
        return cls(Caller.started(EngineSettings.of(engine_args.keywords)))

    @property
    def engine(self) -> SyncEngine:
        """Penstock's engine, which does the work."""
        return self._caller.engine

    async def generate(
        self,
        prompt: Any,
        sampling_params: Mapping[str, Any] | None = None,
        request_id: str = "",
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt while they are generated.

        By default, each yielded output has all text so far. `sampling_params.output_kind` can request only the new
        text, or one output at the end. Leaving the loop aborts the request. Raises `InvalidRequest` for invalid
        arguments.
        """
        if not request_id:
            raise InvalidRequest("generate needs a request_id.", param="request_id")
        outputs = self._caller.stream(
            request_id, prompt_of(prompt), sampling_params, lora=lora_request, priority=priority
        )
        async with aclosing(self._caller.engine._iterate_async(outputs)) as arrived:
            async for output in arrived:
                yield output

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its stream ends with the finish reason "abort"."""
        await self._call(partial(self._caller.abort, request_id))

    async def pause_generation(self, *, mode: str = "abort") -> None:
        """Pause generation between two steps.

        The mode "abort" aborts all requests, "wait" lets them finish first, and "keep" continues them after
        `resume_generation`. Raises `InvalidRequest` for another mode.
        """
        if mode not in MODES:
            raise InvalidRequest(f"mode must be {', '.join(MODES)}, not {mode!r}.", param="mode")
        await self._call(partial(self._engine.pause_generation, MODES[mode]))

    async def resume_generation(self) -> None:
        """Resume generation after `pause_generation`."""
        await self._call(self._engine.continue_generation)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, and return True. If requests run or wait, keep the cache, and return False."""
        return await self._call(self._engine.flush_cache)

    async def get_tokenizer(self) -> TokenizerView:
        """Return the tokenizer."""
        return await self._call(self._engine.get_tokenizer)

    def shutdown(self) -> None:
        """End every request and release all resources."""
        self._caller.engine.close()

    @property
    def _engine(self) -> Any:
        return self._caller.engine._engine

    async def _call(self, function: Any) -> Any:
        return await self._caller.engine._call_async(function)


AsyncLLMEngine = AsyncLLM
