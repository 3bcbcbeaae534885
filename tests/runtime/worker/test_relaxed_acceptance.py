"""The thresholds accept drafts as often as documented, and only in drawn outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ops.sampling import SamplingArrays, native
from runtime.worker.relaxed_acceptance import RelaxedAcceptance
from serve import Engine

LIMITS: list[dict[str, float]] = [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2, "top_p": 0.9}, {"typical_p": 0.5}]
VOCAB, DRAWS = 12, 20_000


def arrays(count: int, **limits: float) -> SamplingArrays:
    neutral: dict[str, Any] = {
        "greedy": False, "temperature": 0.8, "top_n_sigma": 0.0, "typical_p": 1.0, "top_k": 2**30, "top_p": 1.0,
        "min_p": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    }  # fmt: skip
    values = {name: torch.tensor([value] * count) for name, value in {**neutral, **limits}.items()}
    values["top_k"] = values["top_k"].int()
    uniform = torch.from_numpy(np.random.default_rng(0).random(count, np.float32))
    return SamplingArrays(**values, uniform=(uniform * 2**24).floor() / 2**24)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_probabilities_are_those_of_the_draws(limits: dict[str, float]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    ids, _ = native.choose(logits.repeat(DRAWS, 1), arrays(DRAWS, **limits))
    counts = torch.bincount(ids, minlength=VOCAB) / DRAWS
    found = native.probabilities(logits.repeat(VOCAB, 1), arrays(VOCAB, **limits), torch.arange(VOCAB))
    assert found.sum() == pytest.approx(1)
    assert torch.equal(found > 0, counts > 0)
    assert (found - counts).abs().max() < 0.015


@pytest.mark.parametrize(("single", "divisor"), [(1.0, 1.0), (1.0, 0.5), (1.0, 0.25), (0.2, 1.0), (0.0, 1.0)])
def test_drafts_are_accepted_with_the_documented_probability(single: float, divisor: float) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0])
    own = arrays(DRAWS)
    for draft in range(5):
        drafts = torch.full((DRAWS,), draft)
        drawn, _ = native.choose(logits.repeat(DRAWS, 1), own)
        on_device = {"relaxed_rows": torch.arange(DRAWS), "relaxed_drafts": drafts}
        ids = RelaxedAcceptance(single, divisor).choose(logits.repeat(DRAWS, 1), drawn, own, on_device)
        p = float((logits / 0.8).softmax(0)[draft])
        wanted = 1.0 if p >= single else min(1.0, p / divisor)
        assert float((ids == draft).float().mean()) == pytest.approx(wanted, abs=0.015)
        assert torch.equal(ids[ids != draft], drawn[ids != draft])


async def test_thresholds_accept_more_drafts_of_drawn_outputs_only() -> None:
    prompt = "a b c d a b c d a b"
    drawn = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 3}
    rates, greedy = [], []
    for single in (1.0, 0.0):
        options = {"speculative_accept_threshold_single": single, "speculative_adaptive": {"enabled": False}}
        async with Engine(log_level="error", speculative_algorithm="NGRAM", **options) as engine:
            meta = (await engine.generate(prompt, sampling_params=drawn))["meta_info"]
            rates.append(meta.get("spec_num_correct_drafts", 0))
            greedy.append((await engine.generate(prompt, {"temperature": 0, "max_new_tokens": 40}))["output_ids"])
    assert rates[1] > rates[0] + 10
    assert greedy[0] == greedy[1]
