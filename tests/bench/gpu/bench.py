"""The setup of the GPU benchmark: models of real shapes without weights, sizes, and engines."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio

from bench.checkpoints import SHAPES, Shape, write_description
from bench.gpu.limits import Cost, Limits
from runtime.config import Args
from runtime.errors import EngineFailure
from serve.bench.offline import throughput
from serve.bench.workload import RandomLengths, Vocabulary, random_prompts
from serve.python.engine import Engine

Result = TypeVar("Result")

SEED = 1
WARM_UP_SEED = 10_008
WARM_UP_TIMEOUT_S = 300
POLL_S = 0.02
FEW_TOKENS = 8192
TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=512, tied=True)


class Model(NamedTuple):
    """The shape of a real model, under its name."""

    name: str
    shape: Shape
    dtype: str = "bfloat16"

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of_size(self.shape.vocab)


MODELS: Mapping[str, Model] = {
    "qwen3-0.6b": Model("Qwen3-0.6B", SHAPES["Q"]),
    "qwen3-8b": Model("Qwen3-8B", SHAPES["Q8"]),
    "llama-3.1-8b": Model("Llama-3.1-8B", SHAPES["L8"]),
    "tiny": Model("tiny", TINY, "float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the workloads. Lengths are in tokens."""

    decode: tuple[int, int] = (128, 512)  # (input, output)
    repetitions: int = 3  # repetitions of `decode`
    offline: tuple[int, int, int] = (256, 1024, 1024)  # (requests, input, output)
    mixed: tuple[int, int, int] = (256, 100, 1024)  # (requests, minimum length, maximum length), for inputs and outputs
    rates: tuple[float, ...] = (1, 8, 32)  # requests per second
    online: tuple[int, int] = (512, 256)  # (input, output)
    online_s: float = 30
    groups: tuple[int, int] = (16, 16)  # (groups, requests per group)
    prefix: tuple[int, int, int] = (2048, 128, 128)  # (shared prefix, own prompt, output)
    streams: tuple[int, int, int] = (64, 128, 1024)  # (streams, input, output)
    # (rows, cached tokens, lengths of a prompt in the same step)
    launch: tuple[int, int, tuple[int, ...]] = (64, 512, (0, 256, 2048))
    launch_steps: int = 40
    cold_timeout_s: float = 300


FULL = Sizes()
SMALL = Sizes(
    decode=(8, 8),
    repetitions=2,
    offline=(4, 16, 8),
    mixed=(4, 4, 16),
    rates=(20, 40),
    online=(16, 4),
    online_s=0.2,
    groups=(2, 2),
    prefix=(32, 8, 4),
    streams=(3, 8, 24),
    launch=(3, 8, (0, 16)),
    launch_steps=6,
    cold_timeout_s=60,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One run of the benchmark. `words` are options of the engine from the command line; they override the defaults."""

    device: str
    folder: Path  # for configurations and tokenizers
    limits: Limits
    sizes: Sizes = FULL
    only: Model | None = None  # replaces each row's own model
    words: tuple[str, ...] = ()

    def model(self, name: str) -> Model:
        """Return the model with this name, or the model that replaces all models."""
        return self.only or MODELS[name]

    def cost(self, model: Model) -> Cost:
        """Return the minimum cost of the model's work, with the engine's cache dtype."""
        cache = Args.parse(self.words).get("kv_cache_dtype")
        return Cost(model.shape, model.dtype, None if cache == "auto" else cache)

    def path(self, model: Model) -> str:
        """Return a checkpoint of the model without weights, and write it if it does not exist."""
        directory = self.folder / model.name
        if not (directory / "tokenizer_config.json").is_file():  # the file that is written last
            write_description(model.shape, directory, model.dtype)
        return str(directory)

    def tries_only(self, model: Model) -> bool:
        """Whether a small cache suffices: a tiny model could get a cache of hundreds of millions of tokens."""
        return self.device == "cpu" or model.shape is TINY

    def args(self, model: Model, **ours: Any) -> Args:
        """Return the engine's options for this model with dummy weights."""
        base = {
            "model_path": self.path(model),
            "load_format": "dummy",
            "dtype": model.dtype,
            "device": self.device,
            "random_seed": SEED,
            **({"max_total_tokens": FEW_TOKENS} if self.tries_only(model) else {}),
        }
        return Args.of(**{**base, **ours, **Args.parse(self.words).keywords()})

    def run(self, model: Model, work: Callable[[Engine], Awaitable[Result]], **ours: Any) -> Result:
        """Await `work` with a new engine on a new event loop, then free its memory."""
        try:
            return anyio.run(
                partial(_with_engine, self.args(model, **ours), work), backend_options={"use_uvloop": True}
            )
        finally:
            release(self.device)


async def _with_engine(args: Args, work: Callable[[Engine], Awaitable[Result]]) -> Result:
    async with Engine.of(args) as engine:
        return await work(engine)


async def warm_up(engine: Engine, model: Model, requests: int) -> None:
    """Send as many short requests as will be measured, then wait until all graphs are captured."""
    from runtime.worker.model_runner import ModelRunner

    lengths = RandomLengths(input_tokens=32, output_tokens=8, range_ratio=0.25)
    prompts = random_prompts(lengths, requests, WARM_UP_SEED, model.vocabulary, as_text=False)
    await throughput(engine, prompts[:1])
    await throughput(engine, prompts)
    with anyio.move_on_after(WARM_UP_TIMEOUT_S) as waiting:
        for runner in engine.core.runners:
            while isinstance(runner, ModelRunner) and runner.capturing:
                await anyio.sleep(POLL_S)
    if waiting.cancelled_caught:
        raise EngineFailure(f"Graphs were still being captured after {WARM_UP_TIMEOUT_S} s.")
    engine.flush_cache()


def release(device: str) -> None:
    """Free unused memory of the device for the next engine."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
