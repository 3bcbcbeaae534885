"""Attention kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch

from kernel_cases.attention import CASES, Case, outputs, step
from kernel_comparison import agree, differ
from kernel_memory import traffic
from kernel_mutants import mutant
from ops.attention import AttentionMetadata, AttentionOptions, native

pytestmark = pytest.mark.interpreter

SINGLE = ((70, 1), (127, 1), (3, 1))
SHORT_SPLIT = 16  # so short that short rows are split too


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from ops.attention import with_triton

    monkeypatch.setattr(with_triton, "MIN_SPLIT_TOKENS", SHORT_SPLIT)
    return with_triton


# Other cases of the default suite combine the features of these.
PARTS = (
    *("pages of one", "pages of 64", "no sharing", "window of one", "chunks", "soft cap", "sinks"),
    *("slopes", "slopes, half precision", "head dim 80", "head dim 192", "fp8 e5m2 with scales"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in PARTS else []) for name in CASES]
)
def test_the_kernels_equal_native(name: str, with_triton: ModuleType) -> None:
    agree(outputs(with_triton, CASES[name]), outputs(native, CASES[name]))


@pytest.mark.parametrize("cuts", [{"num_kv_splits": 1}, {"num_kv_splits": 3}, {"split_tile_tokens": 48}])
@pytest.mark.parametrize(
    "case",
    [
        Case(SINGLE, window=100, sinks=True),
        Case(
            SINGLE,
            32,
            dtype=torch.float16,
            pool_dtype=torch.float8_e5m2,
            soft_cap=3.0,
            k_scale=0.5,
            v_scale=2.0,
        ),
    ],
)
def test_any_cut_of_the_keys_gives_the_same(case: Case, cuts: dict[str, int], with_triton: ModuleType) -> None:
    agree(outputs(with_triton, case, **cuts), outputs(native, case))


def test_a_row_gives_the_same_bits_alone_and_in_a_batch(with_triton: ModuleType) -> None:
    q, k_pool, v_pool, inputs = step(Case(((70, 1), (5, 1), (90, 1))))
    together = with_triton.attend(q, k_pool, v_pool, inputs, AttentionOptions(scale=0.2))
    first = AttentionMetadata.build([70], [1], inputs.page_table[:1, :5].numpy(), 16)
    assert torch.equal(with_triton.attend(q[:1], k_pool, v_pool, first, AttentionOptions(scale=0.2)), together[:1])


WIDE_ROWS = ((40, 1), (20, 18), (3, 1))


@pytest.mark.parametrize(
    "case",
    [
        Case(WIDE_ROWS, num_heads=5, num_kv_heads=1, head_dim=576),
        Case(WIDE_ROWS, num_heads=20, num_kv_heads=1, head_dim=576, dtype=torch.float16),
        Case(WIDE_ROWS, head_dim=320, window=20, sinks=True),
        Case(WIDE_ROWS, head_dim=512, soft_cap=3.0, k_scale=0.5, v_scale=2.0, pool_dtype=torch.float8_e5m2),
    ],
)
def test_wide_heads_equal_native(case: Case, with_triton: ModuleType) -> None:
    agree(outputs(with_triton, case), outputs(native, case))


@pytest.mark.parametrize("rows", [((40, 1), (3, 1)), ((9, 20),)])
def test_values_in_keys_are_loaded_once(rows: tuple[tuple[int, int], ...], with_triton: ModuleType) -> None:
    q, pool, _, inputs = step(Case(rows, num_heads=4, num_kv_heads=1, head_dim=576, dtype=torch.float16))
    found, reads = [], []
    for values in (pool, pool.clone()):
        with traffic() as counted:
            found.append(with_triton.attend(q, pool, values, inputs, AttentionOptions(scale=0.2)))
        reads.append((counted.loads_from(pool), counted.loads_from(values)))
    assert torch.equal(*found)
    agree(found[:1], [native.attend(q, pool, pool, inputs, AttentionOptions(scale=0.2))])
    (shared, _), (keys, others) = reads
    assert shared == keys == others > 0


def test_the_number_of_programs_changes_no_bit(with_triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(((70, 1), (3, 1)), window=60)
    many = outputs(with_triton, case)
    monkeypatch.setattr(with_triton, "MIN_PARTS", 1)
    monkeypatch.setattr(with_triton, "STEP_PROGRAMS", 1)
    assert all(torch.equal(x, y) for x, y in zip(outputs(with_triton, case), many, strict=True))


def test_a_long_row_alone_uses_the_whole_gpu() -> None:
    from ops.attention import with_triton

    bf16_of_8b, latent_of_16_heads = 32 * 128 * 4, 16 * 576 * 4
    assert with_triton._num_splits(8, bf16_of_8b) == 32
    assert with_triton._num_splits(4, bf16_of_8b) == 64
    assert with_triton._num_splits(1, latent_of_16_heads) == 64
    assert with_triton._num_splits(4, 8 * latent_of_16_heads) == 8  # bounded by the memory of a row


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_batches_equal_native(seed: int, with_triton: ModuleType) -> None:
    random = Random(seed)
    rows = tuple((random.randrange(60), random.choice((1, 1, random.randrange(2, 40)))) for _ in range(4))
    heads, kv_heads = random.choice(((4, 2), (5, 1), (8, 8), (7, 7), (14, 2)))
    soft_cap = random.choice((None, 2.0))
    case = Case(
        rows,
        random.choice((1, 4, 16, 32)),
        heads,
        kv_heads,
        random.choice((8, 48, 64)),
        window=random.choice((None, random.randrange(1, 70))),
        soft_cap=soft_cap,
        sinks=random.random() < 0.5,
        slopes=soft_cap is None and random.random() < 0.5,
    )
    agree(outputs(with_triton, case), outputs(native, case))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # decode kernel
        ("else low + split * size", "else low"),
        ("peak + tl.log2(total)", "peak"),
        ("token.to(tl.int64) * q_token_stride", "row.to(tl.int64) * q_token_stride"),
        # merge kernel
        ("total = total * kept + added", "total = total + added"),
        ("tl.load(sinks + head).to(tl.float32) * LOG2_E", "tl.load(sinks + head).to(tl.float32)"),
        ("summed / total * v_scale", "summed / total"),
        # prefill kernel
        ("kv_head * GROUP + pairs % GROUP", "kv_head * GROUP + 0 * pairs"),
        ("start + tokens, begin", "start + pairs, begin"),
        ("peak = tl.load(sinks + heads, mask=is_query, other=0.0)", "peak = 0.0 * heads"),
        # all kernels
        ("scores * (2.0 / SOFT_CAP)", "scores * (1.0 / SOFT_CAP)"),
        ("> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW"),
        ("keys % PAGE", "keys % PAGE // 2"),
        ("slope[:, None] * (keys[None, :] - positions[:, None])", "slope[:, None] * positions[:, None]"),
        ("tl.load(slopes + heads, mask=in_group < GROUP", "tl.load(slopes + in_group, mask=in_group < GROUP"),
        ("tl.load(slopes + heads, mask=is_query", "tl.load(slopes + pairs % GROUP, mask=is_query"),
    ],
)
def test_a_broken_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("attention", old, new, tmp_path)
    broken.MIN_SPLIT_TOKENS = SHORT_SPLIT  # type: ignore[attr-defined]
    rows = ((0, 21), (40, 1), (30, 18))
    cases = [
        Case(rows, v_scale=2.0),
        Case(rows, window=9, soft_cap=2.0),
        Case(rows, sinks=True),
        Case(rows, slopes=True),
    ]
    assert any(differ(outputs(broken, case), outputs(native, case)) for case in cases)
