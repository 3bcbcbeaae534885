"""The engine in this process, as `offline` and `latency` use it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from runtime.errors import ConfigurationError
from serve.bench.vocabulary import Vocabulary
from serve.bench.workload import Prompt

if TYPE_CHECKING:
    from runtime.config import Args

Result = TypeVar("Result")
Answer = Mapping[str, Any]  # text, output_ids, meta_info: as the native endpoint answers


class Generator(Protocol):
    """What is needed of an engine."""

    def generate(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **more: Any
    ) -> Awaitable[Any]: ...

    def stream(
        self, prompt: str | None = None, sampling_params: Mapping[str, Any] | None = None, **more: Any
    ) -> AsyncIterator[Any]: ...


def parse(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, Args]:
    """Split a command line into this benchmark's options and the engine's; both refuse what they must.

    A name that both have (a benchmark's --seed, say) belongs to the benchmark.
    """
    from runtime.config import Args

    options, rest = parser.parse_known_args(argv)
    return options, Args.parse(rest)


def run_with_engine(args: Args, work: Callable[[Generator], Awaitable[Result]]) -> Result:
    """Start an engine, await `work` with it, shut it down."""
    from serve import Engine

    async def run() -> Result:
        async with Engine.of(args) as engine:
            return await work(engine)

    return anyio.run(run, backend_options={"use_uvloop": True})


def ask(prompt: Prompt, *, ignore_eos: bool = True) -> dict[str, Any]:
    """Keyword arguments of `generate` and `stream` for one prompt: greedy, as many tokens as asked."""
    if prompt.messages is not None:
        raise ConfigurationError("The engine in this process takes texts and token ids, not messages.")
    sampling = {"temperature": 0.0, "max_new_tokens": prompt.output_tokens, "ignore_eos": ignore_eos}
    what = {"prompt": prompt.text} if prompt.ids is None else {"input_ids": list(prompt.ids)}
    return {**what, "sampling_params": sampling}


def model_vocabulary(path: str | None) -> Vocabulary | None:
    """Ids that a local checkpoint knows, from its config.json; None for anything else."""
    config = Path(path or "") / "config.json"
    if path is None or not config.is_file():
        return None
    content = json.loads(config.read_text(encoding="utf-8"))
    size = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    return Vocabulary.of_size(size) if size else None
