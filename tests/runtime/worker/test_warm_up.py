"""The warm-up compiles every kernel that a request may launch. Here, launches only list what they would compile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import late_steps
from compiled_kernels import TargetOnly
from fake_device import LateDevice
from ops.select import Kernels, select
from runtime.batch import Batch, FreshSequence, Penalties
from runtime.kv_cache.pools import KVPool
from runtime.layers.batch_reads import batch_reads
from runtime.loading.loader import load_model
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder, collect_specs
from runtime.request import LogprobParams
from runtime.worker import warm_up as warming
from runtime.worker.model_runner import StepExecutor
from runtime.worker.sampler import Sampler

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels")

PAGE, NUM_SEQUENCES, MAX_TOKENS, STATES = 16, 8, 700, 6
IN_TRITON = (
    *("activation", "attention", "embedding", "kv", "low_rank", "matmul", "moe", "norm", "recurrence", "rope"),
    "sampling",
)


class Listing(TargetOnly):
    """A driver of a GPU of its own, whose list of compiled kernels nothing else uses."""

    def get_current_device(self) -> int:
        return -1


@contextmanager
def listing() -> Iterator[list[tuple[str, str]]]:
    """Within, a launch lists the kernel's name and variant if it would be compiled. Nothing is computed."""
    import triton
    from triton.runtime.jit import JITFunction

    launch: Any = JITFunction.run
    empty: Any = torch.empty
    found: list[tuple[str, str]] = []
    caches: list[dict[Any, Any]] = []

    def compile_nothing(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> Any:
        found.append((self.__name__, key))
        cache = self.device_caches[device][0]
        cache[key] = SimpleNamespace()
        caches.append(cache)
        return cache[key]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch(self, *args, grid=grid, warmup=True, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(JITFunction, "_do_compile", compile_nothing)
        patch.setattr(triton.runtime.driver, "_active", Listing(90))
        patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())  # kernels fill nothing
        try:
            yield found
        finally:
            for cache in caches:
                cache.clear()


class Made:
    """A model in bfloat16 with all kernels in Triton."""

    def __init__(self, family: str) -> None:
        self.kernels: Kernels = select(dict.fromkeys(IN_TRITON, "with_triton"))
        plan = replace(late_steps.model_plan(family), dtype="bfloat16", context_length=MAX_TOKENS)
        self.model: Decoder = load_model(late_steps.facts(family), plan, self.kernels)
        specs = collect_specs(self.model)
        self.pool = KVPool(
            specs,
            64,
            PAGE,
            torch.bfloat16,
            "cpu",
            kinds={kind: STATES for kind in {spec.kind for spec in specs.values()} if kind != "paged"},
        )
        self.device = LateDevice(Random(0), haste=1.0)
        self.sampler = Sampler(
            late_steps.VOCAB_SIZE,
            NUM_SEQUENCES,
            self.device,
            choose=self.kernels.choose,
            penalize=self.kernels.penalize,
            score=self.kernels.score,
        )

    def warm_up(self, max_tokens: int = MAX_TOKENS) -> None:
        warming.warm_up(
            self.model,
            self.pool,
            self.device,
            RankInfo(rank=0),
            max_tokens=max_tokens,
            max_sampled=NUM_SEQUENCES,
            context_length=MAX_TOKENS,
        )
        with torch.inference_mode(), self.device.forward():
            self.sampler.warm_up(NUM_SEQUENCES)

    def run(self, batches: list[Batch]) -> None:
        executor = StepExecutor(
            self.model,
            self.pool,
            self.model,
            num_sequences=NUM_SEQUENCES,
            device=self.device,
            sampler=self.sampler,
        )
        for batch in batches:
            executor.run(batch)()

    def batch(self, counts: list[int], ways: str = "") -> Batch:
        """Return a batch of rows with these counts that sample in these ways."""
        made = warming._batch(counts, self.pool, batch_reads(self.model))
        num_rows, sampling = len(counts), made.sampling
        assert sampling is not None
        rows = np.arange(num_rows)
        if "penalties" in ways:
            fresh = FreshSequence(0, np.array([1, 2], np.int32), np.zeros(0, np.int32))
            params = {"frequency_penalty": np.ones(1, np.float32)}
            sampling = replace(sampling, params=params, penalties=Penalties(rows[:1], rows[:1], (fresh,)))
        if "logprobs" in ways:
            top = 20 if "20" in ways else 1
            sampling = replace(sampling, logprobs=(LogprobParams(top=top), *[None] * (num_rows - 1)))
        return replace(made, sampling=sampling)


def random_batches(made: Made) -> list[Batch]:
    draw = Random(1)
    found = [made.batch([1], "penalties"), made.batch([1], "logprobs"), made.batch([1, 7], "logprobs 20")]
    for _ in range(30):
        tokens = draw.choice([3, 9, 20, 40, 70, 150, 300, MAX_TOKENS])
        rows = draw.choice([1, 1, 2, 5, 8])
        counts = [1] * draw.randrange(rows) + [tokens // rows]
        found.append(made.batch([max(1, count) for count in counts]))
    return found


def test_a_warm_up_of_too_few_tokens_is_noticed() -> None:
    made = Made("qwen3_moe")
    with listing() as found:
        made.warm_up(8)
        before = len(found)
        made.run([made.batch([MAX_TOKENS])])
        assert {name for name, _ in found[before:]} >= {"_grouped_kernel", "_place_kernel"}


def test_penalties_are_compiled_with_the_counts_of_one_sequence() -> None:
    """Counts of all rows would need hundreds of megabytes, which the measured steps do not include."""
    made, counted = Made("qwen3_moe"), list[tuple[int, ...]]()
    made.sampler._penalize = lambda logits, rows, indices, counts, *rest: counted.append(tuple(counts.shape))
    with listing(), torch.inference_mode(), made.device.forward():
        made.sampler.warm_up(NUM_SEQUENCES)
    assert counted == [(1, late_steps.VOCAB_SIZE)]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "qwen3_next",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("deepseek_v2", "lfm2", "granitemoehybrid", "gemma3", "qwen3_seeing")
        ),
    ],
)
def test_no_step_compiles_a_kernel_after_the_warm_up(family: str) -> None:
    made = Made(family)
    with listing() as found:
        made.warm_up()
        names = {name for name, _ in found}
        before = len(found)
        made.run(random_batches(made))
        assert found[before:] == []
    assert "_decode_kernel" in names
    assert "_score_kernel" in names
