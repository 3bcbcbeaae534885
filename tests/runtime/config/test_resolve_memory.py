"""What the KV cache gets, what stays free for steps, and the table that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.machine import GIB, Gpu, Machine
from runtime.config import Args
from runtime.config.plan import Plan
from runtime.config.resolve import num_pages, resolve, size_pool
from runtime.config.resolve.memory import StepMemory, check_balance, largest_step_tokens, memory_table
from runtime.errors import ConfigurationError
from small_facts import FACTS, TOKEN_BYTES

CPU = Machine.named("cpu")
H200 = Machine.named("h200")


def plan(machine: Machine = CPU, **keywords: Any) -> Plan:
    return resolve(Args.of(**{"model_path": "/models/small"} | keywords), machine, FACTS)


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp8_e5m2", "float8_e5m2"), ("fp8_e4m3", "float8_e4m3fn"), ("auto", "bfloat16")]
)
def test_cache_of_one_byte_has_twice_the_pages(asked: str, dtype: str):
    made = plan(H200, kv_cache_dtype=asked)
    assert made.cache.kv_dtype == dtype
    memory = {"available_bytes": 100 * GIB, "total_bytes": 139 * GIB, "weight_bytes": GIB}
    plain = num_pages(plan(H200), FACTS, **memory)
    assert num_pages(made, FACTS, **memory) in ((plain,) if asked == "auto" else (2 * plain, 2 * plain + 1))


def test_e4m3_is_refused_on_gpus_that_lack_it():
    with pytest.raises(ConfigurationError, match="needs compute capability 8.9 .* use fp8_e5m2"):
        plan(Machine.named("a100"), kv_cache_dtype="fp8_e4m3")
    assert plan(Machine.named("a100"), kv_cache_dtype="fp8_e5m2").cache.kv_dtype == "float8_e5m2"
    assert plan(CPU, kv_cache_dtype="fp8_e4m3").cache.kv_dtype == "float8_e4m3fn"


@pytest.mark.parametrize(("ranks", "reserve"), [(1, 12.5), (2, 13.0)])
def test_more_ranks_keep_more_free(ranks: int, reserve: float):
    gpu = Gpu(name="a", capability=(9, 0), memory_bytes=100 * GIB)
    made = plan(replace(H200, gpus=(gpu, gpu)), tp_size=ranks)
    assert made.cache.mem_fraction == pytest.approx(1 - reserve / 100, abs=0.001)


def test_what_steps_need_stays_free():
    made = plan(H200, mem_fraction_static=0.99)
    memory: dict[str, Any] = {
        "available_bytes": 100 * GIB,
        "total_bytes": 139 * GIB,
        "weight_bytes": GIB,
    }
    steps = StepMemory(activation_bytes=20 * GIB, graph_bytes=2 * GIB, measured=True)
    pages, because = size_pool(made, FACTS, **memory, steps=steps)
    assert pages == (100 * GIB - steps.reserved_bytes) // (TOKEN_BYTES * 16)
    assert steps.reserved_bytes == int(20 * GIB * 1.05) + 2 * GIB
    assert "less 23.0 for steps" in because
    small = StepMemory(activation_bytes=GIB >> 10, measured=True)
    assert size_pool(made, FACTS, **memory, steps=small) == size_pool(made, FACTS, **memory)


def test_steps_that_leave_nothing_are_refused():
    steps = StepMemory(activation_bytes=10 * GIB, measured=True)
    with pytest.raises(ConfigurationError, match="Not enough memory"):
        size_pool(
            plan(H200), FACTS, available_bytes=9 * GIB, total_bytes=9 * GIB, weight_bytes=0, steps=steps
        )


def test_largest_step_is_a_chunk_or_the_longest_prompt_and_all_who_run_beside_it():
    alone: dict[str, Any] = {"enable_mixed_chunk": False}
    assert largest_step_tokens(plan(chunked_prefill_size=512, max_running_requests=8, **alone)) == 512
    assert largest_step_tokens(plan(chunked_prefill_size=16, max_running_requests=64, **alone)) == 64
    whole = plan(chunked_prefill_size=-1, max_prefill_tokens=100, max_running_requests=8, **alone)
    assert largest_step_tokens(whole) == FACTS.context_length
    assert largest_step_tokens(plan(chunked_prefill_size=512, max_running_requests=8)) == 520


def test_unequal_gpus_are_refused():
    check_balance([])
    check_balance([100 * GIB, 91 * GIB])
    with pytest.raises(ConfigurationError, match="50.0 GiB free and another 100.0"):
        check_balance([100 * GIB, 50 * GIB])


def test_table_names_every_use_of_memory():
    known = {
        "device": "cuda",
        "total_bytes": 100 * GIB,
        "weight_bytes": 16 * GIB,
        "kv_bytes": 60 * GIB,
        "kv_because": "as asked",
        "free_bytes": 20 * GIB,
    }
    lines = memory_table(
        **known, steps=StepMemory(activation_bytes=4 * GIB, graph_bytes=GIB, measured=True)
    ).split("\n")
    assert [line.split()[:-1][0] for line in lines[1:]] == ["weights", "KV", "activations", "CUDA", "free"]
    assert lines[-1].split()[1] == "15.00"
    assert lines[2] == "  KV cache       60.00  as asked"
    assert "activations" not in memory_table(**known)
