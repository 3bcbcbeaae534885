"""The checks on compiled code report known faults: small kernels, and ours with other settings, that have them."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from code_checks import DECODE, FOUR_BITS, Wanted, faults, too_few_programs
from compiled_kernels import compiling_for
from kernel_memory import traffic
from ops.attention import AttentionMetadata, AttentionOptions
from ops.matmul.grouped import GroupedWeight

VOCAB = 4096


def launches(call: Callable[[], object]) -> Any:
    with compiling_for(90) as kernels:
        call()
    return kernels


def attend(rows: int, num_tokens: int, **options: Any) -> None:
    """Attend with single tokens, in the shape of Llama-3.1-8B, to pages for so many tokens."""
    from ops.attention import with_triton

    q, pools = torch.empty(rows, 32, 128, dtype=torch.bfloat16), torch.empty(2, 64, 8, 16, 128, dtype=torch.bfloat16)
    table = np.zeros((rows, num_tokens // 16), np.int32)
    places = AttentionMetadata.build([3] * rows, [1] * rows, table, 16)
    with_triton.attend(q, *pools, places, AttentionOptions(scale=0.1), **options)


def subjects(found: list[str]) -> set[str]:
    return {each.partition(":")[0] for each in found}


compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels")
slow = pytest.mark.slow


@pytest.mark.interpreter
def test_a_search_that_reads_the_row_in_every_pass_is_noticed() -> None:
    """`test_the_logits_are_read_a_few_times` allows at most 5.1 reads of a logit."""
    import faulty_kernels

    x, out = torch.randn(1, VOCAB), torch.empty(1)
    with traffic() as counted:
        faulty_kernels.bisect_kernel[(1,)](x, out, VOCAB, 1024, 32)
    assert float(out[0]) == pytest.approx(float(x.median()), abs=0.01)
    assert counted.loads_from(x) == 32 * VOCAB > 5.1 * VOCAB


@slow
@compiled
def test_a_search_in_one_program_per_row_is_noticed() -> None:
    import faulty_kernels

    kernels = launches(
        lambda: faulty_kernels.bisect_kernel[(4,)](torch.empty(4, VOCAB), torch.empty(4), VOCAB, 1024, 32)
    )
    assert subjects(too_few_programs(kernels.grids[0])) == {"programs"}


@slow
@compiled
@pytest.mark.parametrize("stages", [1, 3])
def test_one_buffer_for_keys_is_noticed(stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.attention import with_triton

    monkeypatch.setattr(with_triton, "DECODE_STAGES", stages)
    kernels = launches(lambda: attend(3, 512))
    assert "buffers" in subjects(faults(kernels[0], DECODE, tmp_path))


@slow
@compiled
def test_eight_splits_of_one_long_row_are_noticed() -> None:
    assert too_few_programs(launches(lambda: attend(1, 32_768, num_kv_splits=8)).grids[0]) == ["programs: 64"]


@slow
@compiled
def test_narrow_loops_without_splits_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration of the old product with 4-bit weights had the 32 inputs of a group, and one program had them all."""
    from ops.matmul import triton_float8, with_triton

    narrow = {"ROWS_BLOCK": 16, "OUT_BLOCK": 64, "IN_BLOCK": 32, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(with_triton, "_tile", lambda *_, **__: narrow)
    monkeypatch.setattr(triton_float8, "num_splits", lambda *_: 1)

    def call() -> None:
        codes, scales = torch.zeros(1024, 4096, dtype=torch.uint8), torch.zeros(1024, 128)
        packed = with_triton.prepare_grouped(GroupedWeight(codes, scales, scales), torch.bfloat16)
        with_triton.linear(torch.empty(4, 4096, dtype=torch.bfloat16), packed)

    kernels = launches(call)
    # A thread converts 16 weights per iteration.
    found = faults(kernels[0], FOUR_BITS._replace(elements=16, per_element=9.0), tmp_path)
    assert {"buffers", "instructions"} <= subjects(found)
    assert too_few_programs(kernels.grids[0]) == ["programs: 16"]


@slow
@compiled
def test_other_faults_are_noticed(tmp_path: Path) -> None:
    import faulty_kernels

    fat = launches(lambda: faulty_kernels.fill_registers_kernel[(1,)](torch.empty(4096), torch.empty(256 * 256), 256))[
        0
    ]
    assert "spills" in subjects(faults(fat, Wanted(), tmp_path))
    convert = launches(
        lambda: faulty_kernels.convert_kernel[(1,)](torch.zeros(4096, dtype=torch.int32), torch.empty(4096), 4096)
    )[0]
    assert {"conversions", "units", "copies"} <= subjects(
        faults(convert, Wanted(units="HGMMA", wide_copies=True, no_conversions=True), tmp_path)
    )
    large = launches(lambda: attend(3, 512))[0]
    assert {"registers", "shared memory"} <= subjects(faults(large, Wanted(blocks=5), tmp_path))
