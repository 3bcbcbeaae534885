"""Send a workload and show its progress, and run an engine in this process for `offline` and `latency`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import anyio

from runtime.errors import ConfigurationError
from serve.bench.workload import Prompt, Vocabulary

if TYPE_CHECKING:
    from runtime.config import Args
    from serve import Engine


WIDTH = 30
EVERY_S = 0.1


class Progress:
    """Context manager with a progress bar that counts to `total`. The bar stays on the screen at the end."""

    def __init__(self, total: int, what: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() and total > 0
        self._total = total
        self._what = what
        self._done = 0
        self._start_s = self._drawn_s = perf_counter()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        if self._shown:
            self._stream.write("\n")

    def advance(self) -> None:
        self._done += 1
        if self._shown and perf_counter() - self._drawn_s >= EVERY_S:
            self._draw()

    def _draw(self) -> None:
        if not self._shown:
            return
        self._drawn_s = perf_counter()
        full = WIDTH * self._done // self._total
        bar = "#" * full + "." * (WIDTH - full)
        elapsed_s = self._drawn_s - self._start_s
        self._stream.write(f"\r{self._what} [{bar}] {self._done}/{self._total} {elapsed_s:.0f} s ")
        self._stream.flush()


Result = TypeVar("Result")
Send = Callable[[Prompt, float], Awaitable[Result]]


async def drive(
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    send: Send[Result],
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Result], float]:
    """Send all prompts at their arrival times.

    Returns (results in the order of the prompts, seconds from the start until the last result). `send(prompt, start_s)`
    must not raise for errors of the server; `start_s` is the start of the run. While `max_concurrency` prompts run,
    further prompts wait, and this wait is not part of their latency.
    """
    outcomes: list[Result | None] = [None] * len(prompts)
    slots = anyio.Semaphore(max_concurrency) if max_concurrency else None
    start_s = perf_counter()

    async def one(number: int) -> None:
        async with AsyncExitStack() as stack:
            if slots is not None:
                await stack.enter_async_context(slots)
            outcomes[number] = await send(prompts[number], start_s)
        if progress is not None:
            progress.advance()

    async with anyio.create_task_group() as group:
        for number, arrival_s in enumerate(arrivals_s):
            if (early_s := arrival_s - (perf_counter() - start_s)) > 0:
                await anyio.sleep(early_s)
            group.start_soon(one, number)
    return [outcome for outcome in outcomes if outcome is not None], perf_counter() - start_s


Result = TypeVar("Result")
Answer = Mapping[str, Any]  # text, output_ids, meta_info, as in the native API


def parse(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, Args]:
    """Return (the benchmark's options, the engine's options) of a command line. Invalid options are rejected.

    If both have an option of the same name (for example --seed), its value applies only to the benchmark.
    """
    from runtime.config import Args

    options, rest = parser.parse_known_args(argv)
    return options, Args.parse(rest)


def run_with_engine(args: Args, work: Callable[[Engine], Awaitable[Result]]) -> Result:
    """Start an engine, return the result of `work(engine)`, and end the engine.

    The engine's queue has no limit unless an option sets one.
    """
    from serve import Engine

    for limit in ("max_queued_requests", "max_queued_tokens"):
        if getattr(args.schedule, limit) is None:
            args = replace(args, schedule=replace(args.schedule, **{limit: sys.maxsize}))

    async def run() -> Result:
        async with Engine.of(args) as engine:
            return await work(engine)

    return anyio.run(run, backend_options={"use_uvloop": True})


def generate_arguments(prompt: Prompt, *, ignore_eos: bool = True) -> dict[str, Any]:
    """Return keyword arguments of `generate` and `stream` for one prompt, with greedy sampling.

    The output has exactly the prompt's output length, or at most this length if `ignore_eos` is false.
    """
    if prompt.messages is not None:
        raise ConfigurationError("The engine in this process accepts texts and token ids, not messages.")
    sampling = {"temperature": 0.0, "max_new_tokens": prompt.output_tokens, "ignore_eos": ignore_eos}
    content = {"prompt": prompt.text} if prompt.ids is None else {"input_ids": list(prompt.ids)}
    return {**content, "sampling_params": sampling}


def model_vocabulary(path: str | None) -> Vocabulary | None:
    """Return the vocabulary of a local checkpoint, from its config.json, or None if `path` is no local checkpoint."""
    config = Path(path or "") / "config.json"
    if path is None or not config.is_file():
        return None
    content = json.loads(config.read_text(encoding="utf-8"))
    size = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    return Vocabulary.of_size(size) if size else None
