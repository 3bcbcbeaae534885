"""The runner whose launch returns a step, as one whose launch returns a future. Goes with that runner."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from runtime.batch import Batch, StepOutput, Tokens


class AdaptedRunner:
    """`finish_oldest` asks for the oldest step's tokens, as awaiting them did."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._steps: deque[tuple[Any, asyncio.Future[StepOutput]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        step = self._runner.launch(batch)
        if isinstance(step, asyncio.Future):
            return step
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        self._steps.append((step, future))
        return future

    def finish_oldest(self) -> None:
        if not self._steps:
            self._runner.finish_oldest()
            return
        step, future = self._steps.popleft()
        task = asyncio.ensure_future(step.tokens())
        task.add_done_callback(lambda done: _settle(done, future))


def output_of(tokens: Tokens) -> StepOutput:
    ids = [[token] if token >= 0 else [] for token in tokens.ids]
    return StepOutput(ids, tokens.broken, tokens.logprobs, tokens.prompt_logprobs)


def _settle(task: asyncio.Future[Tokens], future: asyncio.Future[StepOutput]) -> None:
    if future.done():
        return
    error = task.exception() if not task.cancelled() else asyncio.CancelledError()
    if error is None:
        future.set_result(output_of(task.result()))
    else:
        future.set_exception(error)
        future.exception()
