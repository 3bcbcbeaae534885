"""Sampling kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch

from kernel_cases.sampling import CASES, Case, masked, outputs, penalized, scored
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.sampling import native

pytestmark = pytest.mark.interpreter


def same(backend: ModuleType, case: Case) -> bool:
    found, wanted = (outputs(module, case) for module in (backend, native))
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_chooses_the_tokens_of_native(name: str) -> None:
    from ops.sampling import with_triton

    assert same(with_triton, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_limits_choose_the_tokens_of_native(seed: int) -> None:
    from ops.sampling import with_triton

    random = Random(seed)
    fields = {
        "temperature": random.choice((0.2, 1.0, 5.0)),
        "top_k": random.choice((1, 5, 100, 2**30)),
        "top_p": random.choice((0.1, 0.6, 0.95, 1.0)),
        "min_p": random.choice((0.0, 0.1, 0.9)),
    }
    assert same(with_triton, Case(fields, random.choice((7, 130, 4100)), random.choice((None, 2, 9))))


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_the_kernel_penalizes_like_native(vocab_size: int) -> None:
    from ops.sampling import with_triton

    agree([penalized(with_triton, vocab_size)], [penalized(native, vocab_size)])


@pytest.mark.parametrize(("vocab_size", "spare_words"), [(100, 0), (64, 3), (5000, 1)])
def test_the_kernel_masks_like_native(vocab_size: int, spare_words: int) -> None:
    from ops.sampling import with_triton

    found, wanted = (masked(backend, vocab_size, spare_words) for backend in (with_triton, native))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ids % 32", "31 - ids % 32"),
        ("tl.load(rows + entry) * stride + ids, float", "entry * stride + ids, float"),
    ],
)
def test_a_broken_mask_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    assert not torch.equal(masked(mutant("sampling", old, new, tmp_path)), masked(native))


@pytest.mark.parametrize(("vocab_size", "num_top"), [(100, 0), (100, 3), (5000, 20)])
def test_the_kernel_scores_like_native(vocab_size: int, num_top: int) -> None:
    from ops.sampling import with_triton

    found, wanted = (scored(backend, vocab_size, num_top) for backend in (with_triton, native))
    assert torch.equal(found[2], wanted[2])
    agree(found[:2] + found[3:], wanted[:2] + wanted[3:])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("top_k among equals", "base + offsets <= last_id", "base + offsets < last_id"),
        ("top_p among equals", "(rank + each - 1) // each", "rank // each"),
        ("top_p", "tl.maximum(whole, 1)", "tl.maximum(whole // 2, 1)"),
        ("top_k and min_p", "is_in & (weight >= floor)", "is_in"),
        ("min_p", "tl.where(weight >= floor, (weight", "tl.where(weight >= 0, (weight"),
        (
            "temperature alone",
            "target = tl.minimum(target, mass - 1)",
            "target = tl.minimum(target // 2, mass - 1)",
        ),
        ("not a number", "(num_nan == 0) & ", ""),
        ("greedy among equals, over blocks", "is_higher = x > top", "is_higher = x >= top"),
        ("top_k of one among zeros of both signs", "tl.where(x == 0.0, 0.0, x)", "x"),
    ],
)
def test_a_broken_choice_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    assert not same(mutant("sampling", old, new, tmp_path), CASES[name])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count.to(tl.float32)", "1.0"),
        ("(count > 0) | (prompted != 0)", "count > 0"),
        ("(shifted - log_mass)", "shifted"),
    ],
)
def test_a_broken_penalty_or_score_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("sampling", old, new, tmp_path)
    assert differ([penalized(broken)], [penalized(native)]) or differ(scored(broken)[:2], scored(native)[:2])
