"""A draft head that is trained for a few steps becomes better, and the engine serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from demo_model import draft_head
from demo_model.corpus import Mixture, documents, encode
from serve import Engine
from serve.demo import WEIGHTS


@pytest.mark.slow
async def test_training_helps_and_the_head_is_served(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    skills = {"arguments": encode(tokenizer, documents("arguments", 1, 40), 128)}
    target = draft_head.Target(WEIGHTS, "cpu")
    head = draft_head.Head(target.shape)
    layout = Mixture(skills, {"arguments": 1.0}, 1).step(512, 512)

    def loss() -> float:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return draft_head.step_loss(head, target, layout, "cpu")[0].item()

    before = loss()
    schedule = draft_head.Schedule(steps=12, tokens_per_step=512, learnt_per_step=512)
    draft_head.train(head, target, Mixture(skills, {"arguments": 1.0}, 1), schedule, "cpu")
    assert loss() < before
    draft_head.write(head, tmp_path, tokenizer)
    params = {"temperature": 0, "max_new_tokens": 20}
    outputs = []
    for options in ({}, {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path)}):
        async with Engine(log_level="error", **options) as engine:
            outputs.append((await engine.generate("What does --page-size do?", sampling_params=params))["output_ids"])
    assert outputs[0] == outputs[1]
