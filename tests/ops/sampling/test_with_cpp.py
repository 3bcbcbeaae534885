"""Sampling kernels in C++ choose the tokens of native."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cpp_kernels import LESSER, THREADS, backend
from kernel_cases.sampling import CASES, masked, outputs
from kernel_cases.sampling import rows as sampling_rows
from ops.sampling import Masks, SamplingArrays, native


def rows(vocab_size: int, count: int = 24) -> tuple[torch.Tensor, SamplingArrays]:
    """Logits and the arrays of rows of all kinds, one behind the other."""
    g = torch.Generator().manual_seed(vocab_size)
    kinds = list(product((False, False, True), (2**30, 2**30, 9), (1.0, 1.0, 0.8), (0.0, 0.3)))
    picked = [kinds[index] for index in torch.randint(len(kinds), (count,), generator=g).tolist()]
    greedy, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*picked))
    spread = 10 ** torch.rand(count, generator=g)
    return torch.randn(count, vocab_size, generator=g) * spread[:, None], sampling_rows(
        count,
        greedy=greedy,
        temperature=0.2 + 2 * torch.rand(count, generator=g),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniform=torch.rand(count, generator=g),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_threads", THREADS)
def test_the_kernel_chooses_the_tokens_of_native(name: str, num_threads: int) -> None:
    found, wanted = (outputs(each, CASES[name]) for each in (backend("sampling", num_threads), native))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("vocab_size", [1, 15, 70, 256, 4097, 131_073])
def test_a_row_chooses_the_same_alone_in_a_batch_and_as_in_native(vocab_size: int) -> None:
    x, given = rows(vocab_size)
    before, choose = x.clone(), backend("sampling", 2).choose
    together, sound = choose(x, given)
    assert torch.equal(x, before)
    assert sound.all()
    each = (SamplingArrays(*(field[row : row + 1] for field in given)) for row in range(len(x)))
    assert together.tolist() == [int(choose(x[row : row + 1], one)[0]) for row, one in enumerate(each)]
    assert together.tolist() == native.choose(x, given)[0].tolist()


def test_uniform_numbers_reach_both_ends_of_what_is_allowed() -> None:
    x = torch.full((3, 150_000), -torch.inf)
    x[:, 7:149_995] = 0.0
    ids = backend("sampling", 2).choose(x, sampling_rows(3, uniform=torch.tensor([0.0, 1 - 2**-24, 1.0])))[0]
    assert ids.tolist() == [7, 149_994, 149_994]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 63, 64, 69])
def test_an_unsound_row_is_reported_and_harms_no_neighbour(bad: float, place: int) -> None:
    x = torch.zeros(3, 70)
    if bad == -torch.inf:
        x[1] = bad
    x[1, place] = bad
    ids, sound = backend("sampling", 2).choose(x, sampling_rows(3))
    assert (ids.tolist(), sound.tolist()) == ([35, 0, 35], [True, False, True])


@pytest.mark.parametrize(("vocab_size", "spare_words"), [(100, 0), (64, 3), (5000, 1)])
def test_the_kernel_masks_like_native(vocab_size: int, spare_words: int) -> None:
    found, wanted = (masked(each, vocab_size, spare_words) for each in (backend("sampling", 2), native))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("vocab_size", [15, 256, 300, 4097, 131_073])
@pytest.mark.parametrize("num_threads", THREADS)
def test_masked_rows_choose_the_tokens_of_native(vocab_size: int, num_threads: int) -> None:
    """By masks that allow nothing, everything, or few tokens far from each other, among rows without one."""
    x, given = rows(vocab_size)
    masked_rows = torch.tensor([23, 0, 5, 6, 11, 2, 17, 18, 9, 14])
    bitmask = torch.zeros(len(masked_rows), -(-vocab_size // 32) + 1, dtype=torch.int32)
    bitmask[1] = -1
    for mask, token_ids in zip(bitmask[2:], torch.randint(vocab_size, (len(masked_rows), 5)).tolist()):
        for token_id in token_ids:
            mask[token_id // 32] |= torch.tensor(1 << token_id % 32).to(torch.int32)
    found, wanted = x.clone(), x.clone()
    ids, sound = backend("sampling", num_threads).choose(found, given, None, Masks(masked_rows, bitmask))
    expected, sound_too = native.choose(wanted, given, None, Masks(masked_rows, bitmask))
    assert (ids.tolist(), sound.tolist()) == (expected.tolist(), sound_too.tolist())
    assert torch.equal(found, wanted)
    assert sound.tolist().index(False) == 23
    kept = [bool(wanted[row, token_id].isfinite()) for row, token_id in enumerate(ids.tolist()[:23])]
    assert all(kept)


@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER)
def test_kernels_for_other_processors_choose_the_same(processor: str) -> None:
    kernels = backend("sampling", 2, *LESSER[processor])
    for case in CASES.values():
        assert all(torch.equal(x, y) for x, y in zip(outputs(kernels, case), outputs(native, case)))
    assert torch.equal(masked(kernels, 5000), masked(native, 5000))
