"""The arguments of FlashInfer's calls, checked by fakes with its signatures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import recorded_flashinfer
from kernel_cases.attention import Case, Step, options, step
from ops.attention import Attend, AttentionOptions, native, with_fa3, with_flashinfer, with_trtllm, with_trtllm_mla
from ops.attention.with_flashinfer import FlashInfer

HALF = Case(dtype=torch.float16)
ROWS = ((40, 1), (0, 21), (3, 1), (30, 18), (15, 1), (0, 16))
CASES = {
    "mixed rows": HALF._replace(rows=ROWS),
    "single tokens": HALF._replace(rows=((70, 1), (127, 1), (31, 1)), page_size=32),
    "long rows": HALF._replace(rows=((0, 60), (7, 9)), page_size=1),
    "window and soft cap": HALF._replace(rows=ROWS, window=9, soft_cap=2.0),
    "fp8 with scales": HALF._replace(rows=ROWS, pool_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for backend in (with_flashinfer, with_trtllm):
        monkeypatch.setattr(backend, "WORKSPACE_BYTES", 16)


@pytest.mark.parametrize("name", CASES)
def test_what_is_planned_gives_the_result_of_native(name: str) -> None:
    case = CASES[name]
    wanted = native.attend(*step(case), options(case))
    torch.testing.assert_close(FlashInfer().attend(*step(case), options(case)), wanted)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("fp8")])
def test_fa3_computes_long_rows_and_decode_kernels_single_tokens(name: str) -> None:
    case, backend, given = CASES[name], FlashInfer("fa3"), step(CASES[name])
    wanted = native.attend(*given, options(case))
    torch.testing.assert_close(backend.attend(*given, options(case)), wanted)
    for setting, (wrapper,) in backend._wrappers.items():
        if setting.kind == "decode":
            assert type(wrapper).__name__ == "BatchDecodeWithPagedKVCacheWrapper"
        else:
            assert wrapper.backend == "fa3"
    assert {(setting.kind == "decode") for setting in backend._wrappers} == {count == 1 for _, count in case.rows}


LATENT = Case(dtype=torch.bfloat16, num_heads=3, num_kv_heads=1, head_dim=576, page_size=32)
LATENT_ROWS = {"mixed rows": ROWS, "single tokens": ((70, 1), (127, 1), (31, 1)), "a prompt": ((0, 40),)}


def latent_step(case: Case) -> Step:
    given = step(case)
    return given._replace(v_pool=given.k_pool)


@pytest.mark.parametrize("make", [with_flashinfer.make_attend, with_fa3.make_attend, with_trtllm_mla.make_attend])
@pytest.mark.parametrize("rows", LATENT_ROWS)
def test_latent_vectors_give_the_result_of_native(rows: str, make: Callable[[], Attend]) -> None:
    case = LATENT._replace(rows=LATENT_ROWS[rows])
    wanted = native.attend(*latent_step(case), options(case))
    found = make()(*latent_step(case), options(case))
    assert found.shape == wanted.shape
    torch.testing.assert_close(found[..., :512], wanted[..., :512])


def test_mixed_rows_of_latent_vectors_are_one_launch() -> None:
    backend, case = FlashInfer(), LATENT._replace(rows=ROWS)
    backend.attend(*latent_step(case), options(case))
    [[wrapper]] = backend._wrappers.values()
    assert wrapper.num_plans == 1
    assert wrapper.planned["causal"]


@pytest.mark.parametrize(
    ("make", "case"),
    [
        (with_flashinfer.make_attend, LATENT._replace(pool_dtype=torch.float8_e4m3fn)),
        (with_flashinfer.make_attend, LATENT._replace(dtype=torch.float32)),
        (with_flashinfer.make_attend, LATENT._replace(window=9)),
        (with_trtllm_mla.make_attend, LATENT._replace(dtype=torch.float16)),
        (with_trtllm_mla.make_attend, LATENT._replace(page_size=16)),
        (with_trtllm_mla.make_attend, LATENT._replace(head_dim=288)),
        (with_trtllm_mla.make_attend, LATENT._replace(sinks=True)),
    ],
)
def test_latent_vectors_without_kernels_are_refused(make: Callable[[], Attend], case: Case) -> None:
    with pytest.raises(ValueError, match="Use triton"):
        make()(*latent_step(case), options(case))


def test_fa3_refuses_a_cache_of_another_dtype() -> None:
    case = CASES["fp8 with scales"]
    with pytest.raises(ValueError, match="Use triton"):
        FlashInfer("fa3").attend(*step(case), options(case))


def test_the_file_of_fa3_names_its_kernels() -> None:
    attend: Any = with_fa3.make_attend()
    assert attend.__self__._kernels == "fa3"


def test_a_step_is_planned_once_for_all_layers_of_a_kind() -> None:
    backend, given = FlashInfer(), step(HALF._replace(rows=((70, 1), (5, 1))))
    plans = []
    for window in (None, 9, None, 9):
        backend.attend(*given, AttentionOptions(scale=0.2, window=window))
        plans.append([ring[-1].planned["indptr"] for ring in backend._wrappers.values()])
    assert [len(plan) for plan in plans] == [1, 2, 2, 2]
    assert plans[3][0] is plans[0][0]
    assert plans[3][1] is plans[1][1]


def test_steps_take_turns_on_the_wrappers() -> None:
    backend, case = FlashInfer(), HALF._replace(rows=((70, 1),))
    used = []
    for _ in range(2 * with_flashinfer.TURNS):
        backend.attend(*step(case), AttentionOptions(scale=0.2))
        (ring,) = backend._wrappers.values()
        used.append(ring[-1])
    assert len(set(used)) == with_flashinfer.TURNS
    assert used[: with_flashinfer.TURNS] == used[with_flashinfer.TURNS :]


@pytest.mark.parametrize("kernels", ["auto", "fa3"])
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_captured_steps_are_planned_anew_each_over_its_own_page_table(kind: str, kernels: str) -> None:
    backend, rows = FlashInfer(kernels), ((70, 1), (5, 1))
    case = HALF._replace(rows=rows, window=9) if kind == "heads" else LATENT._replace(rows=rows)
    q, k_pool, v_pool, metadata = step(case) if kind == "heads" else latent_step(case)
    tables = [replace(metadata, page_table=metadata.page_table.clone(), replans={}) for _ in range(2)]
    for one in tables:
        backend.attend(q, k_pool, v_pool, one, options(case))  # captured: only replayed from here on
    for one, starts in zip(tables, ([33, 3], [2, 5])):
        rows = replace(one, starts=torch.tensor(starts, dtype=torch.int32), starts_host=starts, plan_cache={})
        [replan] = (one.replans or {}).values()
        replan(rows)
    for one, starts in zip(tables, ([33, 3], [2, 5])):
        rows = replace(metadata, starts=torch.tensor(starts, dtype=torch.int32), starts_host=starts, plan_cache={})
        wanted = native.attend(q, k_pool, v_pool, rows, options(case))
        found = backend.attend(q, k_pool, v_pool, one, options(case))
        found, wanted = (each[..., :512] for each in (found, wanted))
        tolerance = 2e-3 if kind == "heads" else 2e-2  # the fakes sum in another order
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance / 2)
    assert len(backend._buffers) == len(backend._fixed) == 2
    if kind == "heads":  # planned for the capture, then with the function that compares no rows in Python
        assert [wrapper.num_fast_plans for wrapper, _ in backend._fixed.values()] == [1, 1]


@pytest.mark.parametrize(
    "case",
    [
        HALF._replace(sinks=True),
        HALF._replace(slopes=True),
        HALF._replace(head_dim=80),
        Case(dtype=torch.float32),
    ],
)
def test_what_it_lacks_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="Use triton"):
        FlashInfer().attend(*step(case), options(case))
