"""The size of the KV cache, the memory reserved for steps, and the memory table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.machine import GIB, Gpu, Machine
from runtime.config import Args
from runtime.config.plan import Plan
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from runtime.kv_cache.sizing import (
    StepMemory,
    check_balance,
    largest_step_tokens,
    max_running,
    memory_table,
    size_pool,
)
from runtime.layers.forward_batch import KVSpec
from small_facts import FACTS, TOKEN_BYTES

SPECS = {index: KVSpec(FACTS.num_kv_heads, FACTS.head_dim) for index in range(FACTS.num_layers)}
CPU = Machine.named("cpu")
H200 = Machine.named("h200")


def plan(machine: Machine = CPU, **keywords: Any) -> Plan:
    return resolve(Args.of(**{"model_path": "/models/small"} | keywords), machine, FACTS)


def pages(made: Plan, *, available: int = 10 * GIB, total: int = 10 * GIB, weights: int = 0) -> int:
    found, _ = size_pool(made, SPECS, available_bytes=available, total_bytes=total, weight_bytes=weights)
    return found


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp8_e5m2", "float8_e5m2"), ("fp8_e4m3", "float8_e4m3fn"), ("auto", "bfloat16")]
)
def test_cache_of_one_byte_has_twice_the_pages(asked: str, dtype: str):
    made = plan(H200, kv_cache_dtype=asked)
    assert made.cache.kv_dtype == dtype
    memory = {"available": 100 * GIB, "total": 139 * GIB, "weights": GIB}
    plain = pages(plan(H200), **memory)
    assert pages(made, **memory) in ((plain,) if asked == "auto" else (2 * plain, 2 * plain + 1))


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
    found, reason = size_pool(made, SPECS, **memory, steps=steps)
    assert found == (100 * GIB - steps.reserved_bytes) // (TOKEN_BYTES * 16)
    assert steps.reserved_bytes == int(20 * GIB * 1.05) + 2 * GIB
    assert "less 23.0 for steps" in reason
    small = StepMemory(activation_bytes=GIB >> 10, measured=True)
    assert size_pool(made, SPECS, **memory, steps=small) == size_pool(made, SPECS, **memory)


def test_steps_that_leave_nothing_are_refused():
    steps = StepMemory(activation_bytes=10 * GIB, measured=True)
    with pytest.raises(ConfigurationError, match="Not enough memory"):
        size_pool(plan(H200), SPECS, available_bytes=9 * GIB, total_bytes=9 * GIB, weight_bytes=0, steps=steps)


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
        "weight_bytes": {"target": 16 * GIB},
        "kv_bytes": 60 * GIB,
        "kv_reason": "as asked",
        "free_bytes": 20 * GIB,
    }
    lines = memory_table(**known, steps=StepMemory(activation_bytes=4 * GIB, graph_bytes=GIB, measured=True)).split(
        "\n"
    )
    assert [line.split()[:-1][0] for line in lines[1:]] == ["weights", "KV", "activations", "CUDA", "free"]
    assert lines[-1].split()[1] == "15.00"
    assert lines[2] == "  KV cache       60.00  as asked"
    assert "activations" not in memory_table(**known)
    both = memory_table(**{**known, "weight_bytes": {"target": 16 * GIB, "draft": GIB}})
    assert both.split("\n")[1] == "  weights        17.00  16.00 of the target, 1.00 of the draft"


def test_pool_takes_a_modest_share_without_a_gpu() -> None:
    made = plan(max_running_requests=10**6)
    assert pages(made, available=10 * GIB, total=100 * GIB) == int(3 * GIB) // (16 * TOKEN_BYTES)


def test_pool_is_not_larger_than_what_can_be_used() -> None:
    assert pages(plan(max_running_requests=2), available=100 * GIB) == 2 * 2048 // 16
    assert pages(plan(max_running_requests=2, page_size=100), available=100 * GIB) == 2 * 21


def test_asked_fraction_holds_weights_and_cache() -> None:
    made = plan(mem_fraction_static=0.5)
    page = 16 * TOKEN_BYTES
    # 8 GiB are free, of which 5 GiB stay free
    assert pages(made, available=8 * GIB, weights=2 * GIB) == 3 * GIB // page
    # Mapped weights do not count as used memory.
    assert pages(made, available=10 * GIB, weights=2 * GIB) == 3 * GIB // page


def test_asked_tokens_cap_the_pool() -> None:
    assert pages(plan(max_total_tokens=1000, max_running_requests=1)) == 62
    made = plan(max_total_tokens=10**12)
    count, why = size_pool(made, SPECS, available_bytes=GIB, total_bytes=GIB, weight_bytes=0)
    assert count == int(0.3 * GIB) // (16 * TOKEN_BYTES)
    assert "fewer than --max-total-tokens requests" in why
    with pytest.raises(ConfigurationError, match="less than one page"):
        plan(max_total_tokens=15)


def test_pool_without_room_is_refused_with_what_is_needed_and_there() -> None:
    asked = r"^Not enough memory\. Please try to increase --mem-fraction-static\. "
    with pytest.raises(ConfigurationError, match=asked) as refused:
        pages(plan(mem_fraction_static=0.1), available=7 * GIB, weights=2 * GIB)
    assert "the weights take 2.00 GiB, other programs 1.00, and one page of 16 tokens takes 0.0" in str(refused.value)
    assert str(refused.value).endswith(": 0.31 of the 10.00 GiB of memory. The fraction 0.1 allows 1.00 GiB.")
    assert pages(plan(mem_fraction_static=0.31), available=7 * GIB, weights=2 * GIB) >= 1
    with pytest.raises(ConfigurationError, match=r"more than the 2\.00 GiB of memory"):
        pages(plan(mem_fraction_static=0.9), available=0, total=2 * GIB, weights=2 * GIB)
    with pytest.raises(
        ConfigurationError, match=r"the 0\.00 GiB of free memory\. The fraction 0\.3 allows 0\.00 GiB\.$"
    ):
        pages(plan(), available=1 << 10)
    steps = StepMemory(activation_bytes=10 * GIB, measured=True)
    with pytest.raises(ConfigurationError, match=r"steps need 10\.50 of the 2\.00 GiB of free memory\.$"):
        size_pool(plan(), SPECS, available_bytes=2 * GIB, total_bytes=10 * GIB, weight_bytes=GIB, steps=steps)


def test_running_sequences_are_bounded_by_the_pool() -> None:
    assert max_running(plan(), 10) == 80
    assert max_running(plan(max_running_requests=3), 10) == 3
    assert max_running(plan(page_size=1), 1) == 1
