"""Drawn tokens with drafts have the distribution of plain draws: a chi-square test that rejects a wrong rule.

The model is a Markov chain, whose counts of transitions are compared (P. Billingsley, Ann. Math. Stat. 32, 1961).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ops.sampling import SamplingArrays, native
from runtime.batch import uniform_numbers
from runtime.worker.drafts import verify
from runtime.worker.relaxed_acceptance import RelaxedAcceptance

VOCAB, DRAFTS, ROWS = 12, 3, 500
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5  # logits after each token
NOISY = TABLE + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))  # of a draft model


def drawn(logits: torch.Tensor, uniform: NDArray[np.float32]) -> tuple[torch.Tensor, SamplingArrays]:
    count = len(logits)
    neutral: dict[str, Any] = {
        "greedy": False, "temperature": 0.8, "top_n_sigma": 0.0, "typical_p": 1.0, "top_k": 2**30, "top_p": 0.95,
        "min_p": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    }  # fmt: skip
    values = {name: torch.tensor([value] * count) for name, value in neutral.items()}
    values["top_k"] = values["top_k"].int()
    arrays = SamplingArrays(**values, uniform=torch.from_numpy(uniform))
    return native.choose(logits, arrays)[0], arrays


def transitions(
    num_tokens: int, seed: int, *, method: str | None = None, rule: RelaxedAcceptance | None = None
) -> NDArray[np.int64]:
    """Return how often each token follows each other one, in about this number of tokens.

    `method` proposes the drafts: "model" draws them with the numbers of the model, "lookup" always proposes the
    likeliest token, and "tree" adds an alternative to the first draft of "model".
    """
    drafts = DRAFTS if method else 0
    seeds = (np.arange(ROWS) + seed).astype(np.uint64)
    last, ends = torch.zeros(ROWS, dtype=torch.int64), np.zeros(ROWS, np.int64)
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    width = drafts + 1
    while counts.sum() < num_tokens:
        uniform = [uniform_numbers(seeds, ends + offset) for offset in range(width)]
        inputs = [last]
        for offset in range(drafts):
            logits = NOISY[inputs[-1]]
            inputs.append(logits.argmax(1) if method == "lookup" else drawn(logits, uniform[offset])[0])
        tokens = torch.stack(inputs, 1)  # [ROWS, width]
        ids, arrays = drawn(TABLE[tokens.flatten()], np.stack(uniform, 1).ravel())
        if rule is not None:
            rows = torch.arange(ROWS * width).view(ROWS, width)[:, :-1].flatten()
            relaxed = {"relaxed_rows": rows, "relaxed_drafts": tokens[:, 1:].flatten()}
            ids = rule.choose(TABLE[tokens.flatten()], ids, arrays, relaxed)
        firsts = torch.arange(ROWS) * width
        accepted, found = torch.zeros(ROWS, dtype=torch.int64), None
        if drafts:
            places = {"draft_firsts": firsts, "draft_owners": torch.arange(ROWS), "draft_ids": tokens[:, 1:]}
            if method == "tree":  # rows of one token after the others
                other = NOISY[last].scatter(1, tokens[:, 1:2], -torch.inf).argmax(1)
                places |= {"branch_owners": torch.arange(ROWS), "branch_firsts": len(ids) + torch.arange(ROWS)}
                places |= {"branch_depths": torch.ones_like(other), "branch_ids": other[:, None]}
                ids = torch.cat([ids, drawn(TABLE[other], uniform[1])[0]])
            found = verify(ids, places)
            accepted = found.accepted
        output = ids[: ROWS * width].view(ROWS, width)
        if found is not None and found.taken is not None:
            output[:, 1] = torch.where(found.taken >= 0, ids[-ROWS:], output[:, 1])
        used = torch.arange(width) <= accepted[:, None]
        before = torch.cat([last[:, None], output[:, :-1]], 1)
        np.add.at(counts, (before[used].numpy(), output[used].numpy()), 1)
        last = output.gather(1, accepted[:, None])[:, 0]
        ends = ends + accepted.numpy() + 1
    return counts


def deviation(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the chi-square statistic of two tables of transitions as a number of standard deviations.

    By Wilson and Hilferty (1931), its cube root is nearly normal. 3.09 is the level 0.001.
    """
    statistic, freedom = 0.0, 0
    for first, second in zip(one, other, strict=True):
        total, shares = first + second, np.array([first.sum(), second.sum()]) / (first.sum() + second.sum())
        seen = total > 0
        for counts, share in zip((first, second), shares, strict=True):
            expected = total[seen] * share
            statistic += float(((counts[seen] - expected) ** 2 / expected).sum())
        freedom += int(seen.sum()) - 1
    cube, variance = (statistic / freedom) ** (1 / 3), 2 / (9 * freedom)
    return float((cube - (1 - variance)) / np.sqrt(variance))


@pytest.mark.parametrize("num_tokens", [25_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_drafts_do_not_change_the_distribution_and_a_wrong_rule_does(num_tokens: int) -> None:
    plain = transitions(num_tokens, 0)
    assert deviation(plain, transitions(num_tokens, 10_000)) < 3.09  # plain draws with other seeds
    for number, method in enumerate(("model", "lookup", "tree"), 2):
        assert deviation(plain, transitions(num_tokens, number * 10_000, method=method)) < 3.09
    wrong = RelaxedAcceptance(1.0, 0.5)
    assert deviation(plain, transitions(num_tokens, 20_000, method="model", rule=wrong)) > 3.09
