"""The code of `tests/gpu` on the CPU with its kernels, so that its errors are found without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import greedy
import paged_forward
import recorded_flashinfer
import tiny_models
from on_device import graphs, memory, operations, session
from on_device.batching import bits_differ
from on_device.busy import shares_of_a_session
from on_device.greedy_tokens import MARGINS, MEAN_MARGIN, SEEDED, answers, shortfalls, wide_path
from on_device.moved import Moved
from on_device.operations import Check
from ops.attention import AttentionMetadata
from ops.machine import Machine
from ops.moe.fused_weights import halves
from ops.select import select
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from serve import Engine

CPU = "cpu"
KEPT_BYTES = 2**20


@pytest.mark.parametrize("check", operations.one_of_each(), ids=str)
def test_an_operation_is_compared(check: Check) -> None:
    operations.compare(check, CPU)
    operations.needs_e4m3(check)


@pytest.mark.parametrize("operation", operations.LARGE)
def test_large_cases_are_cases(operation: str) -> None:
    for name, case in operations.LARGE[operation].items():
        if operation == "attention":  # takes seconds on a CPU
            assert operations.table(operation).step(case).q.shape[1:] == (32, 128)
        else:
            operations.compare(Check(operation, "native", name), CPU)


def test_block_products_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    operations.compare_block_products("with_deepgemm", CPU)
    monkeypatch.setattr("recorded_products.dequantised_weight", lambda codes, scales: codes.float().T)
    with pytest.raises(AssertionError):
        operations.compare_block_products("with_deepgemm", CPU)
    with pytest.raises(AssertionError, match="Triton would compute"):
        operations.compare_block_products("with_triton", CPU)


def test_products_in_nvfp4_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    operations.compare_fp4_products("with_fp4", CPU)
    monkeypatch.setattr("ops.matmul.with_fp4.tiled", lambda scales: scales)
    with pytest.raises(AssertionError, match="with_fp4, 1 rows"):
        operations.compare_fp4_products("with_fp4", CPU)
    with pytest.raises(AssertionError, match="Triton would compute"):
        operations.compare_fp4_products("with_triton", CPU)


@pytest.mark.parametrize("form", ["MXFP4", "NVFP4", "float8 blocks"])
@pytest.mark.parametrize("file", ["with_flashinfer", "with_trtllm_gen"])
def test_fused_experts_are_compared(file: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    operations.compare_fused_experts(file, form, CPU)
    monkeypatch.setattr("ops.moe.with_flashinfer.swapped", lambda rows: rows)
    monkeypatch.setattr("ops.moe.up_first.swapped", lambda rows: rows)
    monkeypatch.setattr("ops.moe.fused_weights.halves", lambda weight: halves(weight)[::-1])
    with pytest.raises(AssertionError, match=f"{file}, {form}"):
        operations.compare_fused_experts(file, form, CPU)


def test_fused_experts_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "find_spec", lambda name: name)
    found = {}
    for name in ("h100", "b200", "a100", "cpu"):
        machine = Machine.named(name)
        monkeypatch.setattr(operations.Machine, "probe", lambda machine=machine: machine)
        found[name] = operations.fused_expert_files()
    assert found["h100"] == [("with_flashinfer", form) for form in ("MXFP4", "float8 blocks")]
    by_trtllm = [("with_trtllm_gen", form) for form in ("MXFP4", "NVFP4", "float8 blocks")]
    assert found["b200"] == [("with_flashinfer", "NVFP4"), *by_trtllm]
    assert found["a100"] == found["cpu"] == []


def test_every_operation_with_kernels_for_gpus_has_a_table() -> None:
    for operation, (_, files) in operations.OPERATIONS.items():
        if operation not in operations.NO_TABLE:
            assert operations.cases(operation)
        else:
            assert {"with_triton"}.isdisjoint(files)


@pytest.mark.parametrize(
    ("operation", "file", "function"), [("activation", "native", "gate"), ("norm", "native", "rms_norm")]
)
def test_a_wrong_kernel_is_noticed(operation: str, file: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = operations._backend(operation, file)
    wrong = SimpleNamespace(**vars(right))
    setattr(wrong, function, lambda *args, **more: 1.02 * getattr(right, function)(*args, **more))
    monkeypatch.setattr(operations, "_backend", lambda _, file: right if file == "native" else wrong)
    case = next(iter(operations.cases(operation)))
    with pytest.raises(AssertionError):
        operations.compare(Check(operation, "with_triton", case), CPU)


def test_moved_arguments_keep_their_places_and_are_written_back() -> None:
    memory_of_all = torch.arange(24.0).view(4, 6)
    left, right = memory_of_all[:, :2], memory_of_all[:, 3:]
    seen: dict[str, Any] = {}

    def function(x: torch.Tensor, *, y: torch.Tensor, places: AttentionMetadata) -> tuple[torch.Tensor, ...]:
        seen.update(strides=(x.stride(), y.stride()), offset=y.storage_offset(), size=places.page_size)
        seen["together"] = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        seen["elsewhere"] = x.untyped_storage().data_ptr() != memory_of_all.untyped_storage().data_ptr()
        x.add_(100)
        return x * 2, y.clone()

    places = AttentionMetadata.build([0], [1], torch.zeros(1, 1, dtype=torch.int32).numpy(), 16)
    moved = Moved(SimpleNamespace(function=function), CPU)
    doubled, copied = moved.function(left, y=right, places=places)
    assert seen == {
        "strides": ((6, 1), (6, 1)), "offset": 3, "size": 16, "together": True, "elsewhere": True,
    }  # fmt: skip
    assert memory_of_all[:, :2].tolist() == [[100, 101], [106, 107], [112, 113], [118, 119]]
    assert doubled[0].tolist() == [200, 202]
    assert copied.tolist() == right.tolist()


def test_rows_are_compared_alone_and_in_a_batch() -> None:
    assert bits_differ(CPU, "native") == []


async def test_greedy_tokens_are_compared_with_transformers() -> None:
    path = greedy.model_path("llama")
    found = await answers(path, CPU, disable_cuda_graph=True, disable_overlap_schedule=True)
    assert found == greedy.reference("llama")


@pytest.mark.parametrize("dtype", MARGINS)
async def test_tokens_in_any_dtype_are_nearly_the_best_and_others_are_not(dtype: str) -> None:
    path = wide_path("qwen3")
    found = await answers(path, CPU, dtype=dtype)
    assert max(shortfalls(path, CPU, dtype, found)) < MARGINS[dtype]
    found[3][5] = (found[3][5] + 1) % 128
    assert max(shortfalls(path, CPU, dtype, found)) > MARGINS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("family", greedy.FAMILIES)
def test_wide_checkpoints_fit_the_models(family: str) -> None:
    facts = read_facts(wide_path(family), {})
    assert load_model(facts, paged_forward.plan_for(facts.path), select()).hidden_size == facts.hidden_size
    assert facts.head_dim == (576 if family == "deepseek_v3" else 64)  # sizes for which FlashInfer has kernels


@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2"])
async def test_tokens_over_a_cache_of_8_bits_are_good_on_the_whole(cache: str) -> None:
    path = wide_path("llama")
    found = await answers(path, CPU, dtype="bfloat16", kv_cache_dtype=cache)
    below = shortfalls(path, CPU, "bfloat16", found)
    assert sum(below) / len(below) < MEAN_MARGIN
    below = shortfalls(path, CPU, "bfloat16", [[(token + 1) % 128 for token in row] for row in found])
    assert sum(below) / len(below) > 5 * MEAN_MARGIN


async def test_eager_and_replayed_answers_are_compared() -> None:
    eager, replayed = await graphs.eager_and_replayed(greedy.model_path("llama"), CPU, sampling=SEEDED)
    assert eager == replayed != greedy.reference("llama")


async def test_a_whole_session_is_answered() -> None:
    async with Engine(tiny_models.cached(), device=CPU, **session.OPTIONS) as engine:
        with session.no_waiting(CPU):
            await session.run(engine)
        assert engine.status().num_retracted > 0


async def test_engines_leave_the_memory_as_they_found_it() -> None:
    first, *_, last = await memory.after_cycles(4, tiny_models.cached(), CPU, max_total_tokens=4096)
    assert abs(last - first) < KEPT_BYTES


async def test_an_engine_that_stays_is_noticed() -> None:
    before = memory.allocated_bytes(CPU)
    async with Engine(tiny_models.cached(), device=CPU, max_total_tokens=16_384):
        assert memory.allocated_bytes(CPU) - before > KEPT_BYTES


async def test_a_step_without_memory_costs_the_newest_request_alone() -> None:
    await memory.check_starving(CPU)


async def test_the_device_tells_how_long_it_is_busy() -> None:
    shares = await shares_of_a_session(CPU)
    assert len(shares) > 100
    assert sum(shares) / len(shares) > 0.05
