"""Sampling kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch

from kernel_cases.sampling import CASES, Case, masked, outputs, penalized, rows, scored
from kernel_comparison import agree, differ
from kernel_memory import traffic
from kernel_mutants import backend_with_mutant, mutant
from ops.sampling import native

pytestmark = pytest.mark.interpreter
BEYOND_BLOCKS = {"top_k": [5000, 2**30, 2**30, 4500], "top_p": [1.0, 0.5, 0.97, 0.9], "temperature": 4.0}


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes about as long for a short block as for a long one."""
    from ops.sampling import with_triton

    monkeypatch.setattr(with_triton, "HELD_BLOCK", 8192)


def same(backend: ModuleType, case: Case) -> bool:
    found, wanted = (outputs(module, case) for module in (backend, native))
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


LONG = ("all limits", "all limits among equals, over blocks", "top_k and min_p")  # many steps of the interpreter


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
def test_the_kernel_chooses_the_tokens_of_native(name: str) -> None:
    from ops.sampling import with_triton

    assert same(with_triton, CASES[name])


@pytest.mark.parametrize(
    ("max_held", "name"),
    [
        (64, "top_p"),  # some bins fit into a list of this length, and all of them do not
        pytest.param(64, "all limits among equals, over blocks", marks=pytest.mark.slow),
        (3, "top_k among equals"),  # not even one bin fits
        (3, "top_p among equals"),
        (3, "forbidden tokens"),
    ],
)
def test_rows_with_long_lists_choose_the_tokens_of_native(
    max_held: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.sampling import with_triton

    monkeypatch.setattr(with_triton, "MAX_HELD", max_held)
    assert same(with_triton, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 8, 4096])
def test_the_token_does_not_depend_on_the_number_of_parts(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.sampling import with_triton

    monkeypatch.setattr(with_triton, "PROGRAMS", programs)
    monkeypatch.setattr(with_triton, "HELD_BLOCK", 1024)
    assert same(with_triton, Case(BEYOND_BLOCKS, 6000))


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"top_k": 20, "top_p": 0.95}, 3.1),  # the logits twice, and once more for the list
        ({"top_p": 0.99, "temperature": 5.0}, 5.1),  # flat: three lists
        ({}, 3.1),
    ],
)
def test_the_logits_are_read_a_few_times(limits: dict[str, float], most: float) -> None:
    """A search that reads all logits in every step of a bisection takes milliseconds for a vocabulary of 128k."""
    from ops.sampling import with_triton

    x = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(1))
    with traffic() as counted:
        with_triton.choose(x, rows(1, **limits))
    assert counted.loads_from(x) <= most * x.numel()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_limits_choose_the_tokens_of_native(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.sampling import with_triton

    random = Random(seed)
    monkeypatch.setattr(with_triton, "MAX_HELD", random.choice((5, 50, 8192)))
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
def test_a_broken_mask_is_noticed(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.sampling import with_triton

    broken = mutant("sampling", old, new, tmp_path, "triton_logits")
    monkeypatch.setattr(with_triton, "apply_bitmask", broken.apply_bitmask)
    assert not torch.equal(masked(with_triton), masked(native))


@pytest.mark.parametrize(("vocab_size", "num_top"), [(100, 0), (100, 3), (5000, 20)])
def test_the_kernel_scores_like_native(vocab_size: int, num_top: int) -> None:
    from ops.sampling import with_triton

    found, wanted = (scored(backend, vocab_size, num_top) for backend in (with_triton, native))
    assert torch.equal(found[2], wanted[2])
    agree(found[:2] + found[3:], wanted[:2] + wanted[3:])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("top_p among equals", "(rank + each - 1) // each", "rank // each"),
        ("top_k among equals", "+ rank * each", "+ each"),
        ("top_p", "return tl.maximum(whole, 1)", "return tl.maximum(whole // 2, 1)"),
        ("top_k and min_p", "tl.where(floor > least, mass, prefix_mass)", "prefix_mass"),
        ("min_p", "kept += tl.where(weight >= floor", "kept += tl.where(weight >= 0"),
        ("min_p", "fixed = tl.where(weight >= floor", "fixed = tl.where(weight >= 0"),
        ("temperature alone", "return tl.minimum(target, mass - 1)", "return tl.minimum(target // 2, mass - 1)"),
        ("not a number", "(num_nan == 0) & ", ""),
        ("greedy among equals, over blocks", "is_higher = x > top", "is_higher = x >= top"),
        ("top_k of one among zeros of both signs", "tl.where(x == 0.0, 0.0, x)", "x"),
        pytest.param(
            "all limits among equals, over blocks",
            "place = tl.sum(tl.where(bins <= last, before, 0), axis=0)",
            "place = 0",
            marks=pytest.mark.slow,
        ),
        ("top_k", "cumsum(count, axis=0) >= limit, bins", "cumsum(count, axis=0) > 0, bins"),
    ],
)
def test_a_broken_choice_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    broken = backend_with_mutant("sampling", old, new, tmp_path)
    vars(broken)["HELD_BLOCK"] = 8192
    if "is_higher" in old:
        vars(broken)["PROGRAMS"] = 1  # a part has several blocks
    assert not same(broken, CASES[name])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count.to(tl.float32)", "1.0"),
        ("(count > 0) | (prompted != 0)", "count > 0"),
        ("(shifted - log_mass)", "shifted"),
    ],
)
def test_a_broken_penalty_or_score_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("sampling", old, new, tmp_path, "triton_logits")
    assert differ([penalized(broken)], [penalized(native)]) or differ(scored(broken)[:2], scored(native)[:2])
