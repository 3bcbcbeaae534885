"""Low-rank additions of Triton in the interpreter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kernel_cases.low_rank import CASES, Case, expected, inputs, outputs
from kernel_comparison import agree, differ
from kernel_mutants import mutant

pytestmark = pytest.mark.interpreter

FURTHER_CASES = {
    "ranks larger than a block": Case((1, 2, 3, 1) * 3, ranks=(64, 8, 33), rank=64, sizes=(70, 20)),
    "more lines than a block": Case((2, 1, 0), ranks=(40, 3), rank=40, sizes=(9, 60, 3)),
    "chunks with programs of their own": Case((1, 4, 3) * 12, size=150, sizes=(60, 10)),
    "chunks in one program": Case((1, 4) * 20 + (0, 3, 4), size=150, sizes=(20,)),
    "a large rank in half precision": Case((1, 2), ranks=(33, 2), rank=33, sizes=(66,), dtype=torch.float16),
}
ALL_CASES = {**CASES, **FURTHER_CASES}


def small(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let few inputs and tokens be many for the module."""
    monkeypatch.setattr(module, "MIN_CHUNK", 48)
    monkeypatch.setattr(module, "MAX_SPLIT_TOKENS", 40)
    return module


@pytest.fixture(autouse=True)
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16, which it stores as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def as_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *more: create_dot(self, as_float32(a), as_float32(b), *more),
    )


@pytest.mark.parametrize("name", ALL_CASES)
def test_each_token_gets_the_product_of_its_slot(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.low_rank import with_triton

    agree(outputs(small(with_triton, monkeypatch), ALL_CASES[name]), expected(ALL_CASES[name]))


def test_factors_in_bfloat16_multiply_sums_in_float32() -> None:
    from ops.low_rank.with_triton import add_low_rank

    y, x, weights, slots = inputs(CASES["bfloat16"])
    wide = weights._replace(a=weights.a.float(), b=weights.b.float())
    found = add_low_rank(torch.zeros(y.shape), x, weights, slots)
    wanted = add_low_rank(torch.zeros(y.shape), x.float(), wide, slots)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)


def test_a_token_has_the_same_result_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.low_rank import with_triton

    add = small(with_triton, monkeypatch).add_low_rank
    y, x, weights, slots = inputs(Case((4, 1, 3, 0, 4) * 14, size=300, sizes=(20,)))
    together = add(y.clone(), x, weights, slots)
    for token in (0, 31, 32, 67, 69):
        one = slice(token, token + 1)
        assert torch.equal(add(y[one].clone(), x[one], weights, slots[one]), together[one])


def test_views_of_tokens_are_read_and_written_in_place() -> None:
    from ops.low_rank.with_triton import add_low_rank

    y, x, weights, slots = inputs(CASES["sub-layers"])
    wide_x, wide_y = torch.randn(4, x.shape[1] + 9), torch.randn(4, y.shape[1] + 3)
    wide_x[:, 5:-4], wide_y[:, 1:-2], before = x, y, wide_y.clone()
    add_low_rank(wide_y[:, 1:-2], wide_x[:, 5:-4], weights, slots)
    agree([wide_y[:, 1:-2]], expected(CASES["sub-layers"]))
    assert torch.equal(wide_y[:, :1], before[:, :1])
    assert torch.equal(wide_y[:, -2:], before[:, -2:])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mixed", "(all_slots % tl.num_programs(1) == tl.program_id(1), all_slots, 0)", "(tokens < 4, all_slots, 0)"),
        ("mixed", "lines % RANK < tl.load(ranks + slot - 1)", "lines % RANK < 3"),
        ("mixed", "base + indices < rank", "base + indices < RANK"),
        (
            "mixed",
            "mask=is_token[:, None] & is_line[None, :]",
            "mask=(tokens < num_tokens)[:, None] & is_line[None, :]",
        ),
        ("sub-layers", "values = tl.load(sums + part * RANK + base", "values = tl.load(sums + base"),
        ("sub-layers", "(columns >= begin)[None, :] & ", ""),
        ("ranks larger than a block", "b_rows + base * OUT", "b_rows"),
        ("chunks with programs of their own", "tl.static_range(1, CHUNKS)", "tl.static_range(1, CHUNKS - 1)"),
        ("chunks with programs of their own", "first = tl.program_id(2) * CHUNK", "first = 0"),
        ("chunks in one program", "total += part", "total = part"),
        ("bfloat16", "(values - high.to(tl.float32))", "values"),
    ],
)
def test_a_broken_kernel_is_noticed(
    name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = small(mutant("low_rank", old, new, tmp_path), monkeypatch)
    assert differ(outputs(broken, ALL_CASES[name]), expected(ALL_CASES[name]))
