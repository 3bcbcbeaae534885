"""`LLMEngine`: vLLM's interface with `add_request` and `step`, on Penstock's engine."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from runtime.errors import InvalidRequest
from serve.python.sampling import RequestOutputKind
from serve.python.sync_engine import SyncEngine
from serve.python.tokens import TokenizerView
from serve.vllm.arguments import EngineArgs, EngineSettings
from serve.vllm.generate import Caller, with_defaults
from serve.vllm.outputs import RequestOutput
from serve.vllm.prompts import prompt_of

CHECK_S = 1.0  # seconds between two checks that the engine is still open


class LLMEngine:
    """An engine whose caller adds requests with `add_request` and takes their outputs with `step`.

        engine = LLMEngine.from_engine_args(EngineArgs(model="..."))
        engine.add_request("0", "Hello", SamplingParams(temperature=0))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)

    Unlike vLLM's engine, this engine runs in its own thread, so it also computes between two calls of `step`.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._arrived: queue.Queue[RequestOutput | Exception] = queue.Queue()
        self._kept: list[RequestOutput | Exception] = []  # taken from `_arrived`, but not yet returned by `step`
        self._running: set[str] = set()
        self._pieces: set[str] = set()  # ids of running requests with `output_kind` DELTA

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an engine with these arguments."""
        return cls(Caller.started(EngineSettings.of(engine_args.keywords)))

    @property
    def engine(self) -> SyncEngine:
        """Penstock's engine, which does the work."""
        return self._caller.engine

    @property
    def tokenizer(self) -> TokenizerView:
        """The tokenizer."""
        return self._caller.engine.tokenizer

    def get_tokenizer(self) -> TokenizerView:
        """Return the tokenizer."""
        return self.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Mapping[str, Any] | None = None,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> None:
        """Add a request, whose outputs `step` will return.

        Raises `InvalidRequest` if a request with this id is unfinished. Other errors of the request are raised by
        `step`.
        """
        if request_id in self._running:
            raise InvalidRequest(f"A request {request_id!r} is unfinished.", param="request_id")
        made = with_defaults(params)
        outputs = self._caller.stream(request_id, prompt_of(prompt), made, lora=lora_request, priority=priority)

        async def read() -> None:
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        self._arrived.put(output)
            except Exception as error:  # raised later, by `step`
                error.add_note(f"It was raised by request {request_id!r}.")
                self._running.discard(request_id)
                self._arrived.put(error)

        self._running.add(request_id)
        if made.output_kind is RequestOutputKind.DELTA:
            self._pieces.add(request_id)
        self._caller.engine._begin(read)

    def step(self) -> list[RequestOutput]:
        """Wait for new outputs, and return the latest output of each request that has one.

        For requests with `output_kind` DELTA, return all new outputs. If there are no unfinished requests, return an
        empty list. Raises the error of a request that failed, and `EngineClosed` if the engine ends first.
        """
        if not self.has_unfinished_requests():
            return []
        arrived, self._kept = self._kept or [self._first()], []
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        latest: dict[str | int, RequestOutput] = {}
        for place, output in enumerate(arrived):
            if isinstance(output, Exception):
                self._kept = [*latest.values(), *arrived[place + 1 :]]
                raise output
            latest[place if output.request_id in self._pieces else output.request_id] = output
        self._running -= {output.request_id for output in latest.values() if output.finished}
        self._pieces &= self._running
        return [*latest.values()]

    def _first(self) -> RequestOutput | Exception:
        while True:
            try:
                return self._arrived.get(timeout=CHECK_S)
            except queue.Empty:
                self._caller.engine._check_open()

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` will return further outputs."""
        return bool(self._running or self._kept) or not self._arrived.empty()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._running)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests. Their last outputs have the finish reason "abort"."""
        for each in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._caller.engine._call(partial(self._caller.abort, each))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, and return True. If requests run or wait, keep the cache, and return False.

        `reset_running_requests`: retract running requests first; they are computed again afterwards.
        """
        engine = self._caller.engine
        if not reset_running_requests:
            return engine.flush_cache()
        engine.pause_generation("retract")
        try:
            return engine.flush_cache()
        finally:
            engine.continue_generation()

    def shutdown(self) -> None:
        """End every request and release all resources."""
        self._caller.engine.close()
