"""Masks that forbid tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_cases.sampling import masked, rows
from ops.sampling import native


def bits(allowed: set[int], num_words: int) -> Tensor:
    """Return one row of words in which the bits of these ids are 1."""
    words = [sum(1 << i % 32 for i in allowed if i // 32 == word) for word in range(num_words)]
    return torch.tensor([words]).to(torch.int32)  # values of 2**31 or more become negative


@pytest.mark.parametrize("allowed", [{0}, {31}, {32}, {31, 32, 69}, set(range(70)), set()])
def test_exactly_the_allowed_tokens_keep_their_logits(allowed: set[int]) -> None:
    logits = torch.randn(3, 70)
    before = logits.clone()
    native.apply_bitmask(logits, torch.tensor([1]), bits(allowed, 3))
    kept = torch.tensor([i in allowed for i in range(70)])
    assert torch.equal(logits[1], before[1].where(kept, torch.tensor(-torch.inf)))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_rows_come_in_any_order() -> None:
    logits = torch.randn(5, 70)
    masks = torch.cat([bits({token_id}, 3) for token_id in (3, 33, 66, 7)])
    native.apply_bitmask(logits, torch.tensor([1, 3, 2, 4]), masks)
    assert logits.isfinite().nonzero()[70:].tolist() == [[1, 3], [2, 66], [3, 33], [4, 7]]


def test_a_row_without_any_token_is_not_sound() -> None:
    logits = torch.randn(1, 40)
    native.apply_bitmask(logits, torch.tensor([0]), bits(set(), 2))
    _, sound = native.choose(logits, rows(1, greedy=True))
    assert not sound.any()


@pytest.mark.parametrize("vocab_size", [64, 100])
def test_shifts_on_a_device_and_bytes_on_the_host_agree(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = masked(native, vocab_size)
    monkeypatch.setattr(native, "_is_host", lambda _logits: False)
    assert torch.equal(masked(native, vocab_size), wanted)
