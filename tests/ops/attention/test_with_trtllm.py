"""The arguments of TensorRT-LLM's kernels, checked by fakes with their signatures."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import recorded_flashinfer
from kernel_cases.attention import Case, options, step
from ops.attention import AttentionOptions, native, with_trtllm
from ops.attention.with_trtllm import TensorRT
from recorded_trtllm import used_workspaces

HALF = Case(dtype=torch.float16)
ROWS = ((40, 1), (0, 21), (3, 1), (30, 18), (15, 1), (0, 16))
CASES = {
    "mixed rows": HALF._replace(rows=ROWS),
    "single tokens": HALF._replace(rows=((70, 1), (127, 1), (31, 1)), page_size=32),
    "long rows": HALF._replace(rows=((0, 60), (7, 9)), page_size=64),
    "window": HALF._replace(rows=ROWS, window=9),
    "sinks": HALF._replace(rows=ROWS, sinks=True),
    "scales": HALF._replace(rows=ROWS, k_scale=0.5, v_scale=2.0),
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(with_trtllm, "WORKSPACE_BYTES", 16)
    used_workspaces.clear()


@pytest.mark.parametrize("name", CASES)
def test_what_is_launched_gives_the_result_of_native(name: str) -> None:
    case = CASES[name]
    wanted = native.attend(*step(case), options(case))
    torch.testing.assert_close(TensorRT().attend(*step(case), options(case)), wanted)


def test_rows_with_draft_tokens_are_longer_rows() -> None:
    given, asked = step(CASES["mixed rows"]), options(CASES["mixed rows"])
    drafted = given._replace(inputs=replace(given.inputs, draft_rows=(3, 5), plan_cache={}))
    torch.testing.assert_close(TensorRT().attend(*drafted, asked), native.attend(*given, asked))


def test_an_engine_has_one_workspace_for_all_layers() -> None:
    backend = TensorRT()
    for _ in range(2):
        backend.attend(*step(CASES["mixed rows"]), AttentionOptions(scale=0.2))
    assert len(used_workspaces) == 4
    assert len(set(used_workspaces)) == 1


@pytest.mark.parametrize(
    "case",
    [
        HALF._replace(soft_cap=2.0),
        HALF._replace(slopes=True),
        HALF._replace(page_size=1),
        HALF._replace(head_dim=80),
        HALF._replace(pool_dtype=torch.float8_e4m3fn),
        Case(dtype=torch.float32),
    ],
)
def test_what_it_lacks_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="Use triton"):
        TensorRT().attend(*step(case), options(case))
