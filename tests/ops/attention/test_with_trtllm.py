"""The arguments of TensorRT-LLM's kernels, checked by fakes with their signatures."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases.attention import Case, options, step
from ops.attention import AttentionMetadata, AttentionOptions, native, with_trtllm
from ops.attention.with_trtllm import TensorRT

# The two calls in flashinfer-python 0.6.13, with the signatures of its source. They compute with native attention.
used_workspaces: list[int] = []  # addresses


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
    window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
    enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None,
    cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
) -> Tensor:  # fmt: skip
    assert backend == "trtllm-gen"  # a Hopper GPU would use other kernels otherwise
    assert len(query) == len(seq_lens)
    return _compute(dict(locals()), [1] * len(query), max_seq_len)


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
    batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
    o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
    skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
    return_lse=False,
) -> Tensor:  # fmt: skip
    counts = cum_seq_lens_q.diff().tolist()
    assert batch_size == len(counts) == len(seq_lens)
    assert max_q_len == max(counts)
    assert cum_seq_lens_kv.dtype == cum_seq_lens_q.dtype == torch.int32
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert cum_seq_lens_kv[0] == 0
    return _compute(dict(locals()), counts, max_kv_len)


def _compute(given: dict[str, Any], counts: list[int], longest: int) -> Tensor:
    """Compute native attention with these arguments."""
    assert given["kv_layout"] == "HND"
    assert given["seq_lens"].dtype == given["block_tables"].dtype == torch.int32
    assert given["query"].is_contiguous()
    assert not given["workspace_buffer"].any()
    used_workspaces.append(given["workspace_buffer"].data_ptr())
    lengths, (k_pool, v_pool) = given["seq_lens"].tolist(), given["kv_cache"]
    assert longest == max(lengths)
    starts = [length - count for length, count in zip(lengths, counts)]
    inputs = AttentionMetadata.build(starts, counts, given["block_tables"].numpy(), k_pool.shape[2])
    return native.attend(
        given["query"],
        k_pool,
        v_pool,
        inputs,
        AttentionOptions(
            scale=given["bmm1_scale"],
            window=None if given["window_left"] < 0 else given["window_left"] + 1,
            sinks=given["sinks"],
            v_scale=given["bmm2_scale"],
        ),
    )


CALLS = {
    "flashinfer.decode": trtllm_batch_decode_with_kv_cache,
    "flashinfer.prefill": trtllm_batch_context_with_kv_cache,
}


def modules() -> dict[str, ModuleType]:
    """Return fakes of `flashinfer.decode` and `flashinfer.prefill`."""
    stand_ins = {"flashinfer": ModuleType("flashinfer")}
    for name, call in CALLS.items():
        stand_ins[name] = ModuleType(name)
        setattr(stand_ins[name], call.__name__, call)
    return stand_ins


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
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(with_trtllm, "WORKSPACE_BYTES", 16)
    used_workspaces.clear()


@pytest.mark.parametrize("name", CASES)
def test_what_is_launched_gives_the_result_of_native(name: str) -> None:
    case = CASES[name]
    wanted = native.attend(*step(case), options(case))
    torch.testing.assert_close(TensorRT().attend(*step(case), options(case)), wanted)


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


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("module", CALLS)
def test_the_record_is_that_of_flashinfer(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", *CALLS):
        monkeypatch.delitem(sys.modules, name)
    call = CALLS[module]
    real = inspect.signature(getattr(import_module(module), call.__name__))
    assert list(real.parameters) == list(inspect.signature(call).parameters)
