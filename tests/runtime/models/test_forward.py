"""How to call a model: build the inputs of a step, compute hidden states, compute logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import paged_forward
import tiny_checkpoints
from ops.select import select
from runtime.kv_cache.pools import KVPool
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model


def test_prompt_then_decode_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    path = tiny_checkpoints.write(tmp_path, "llama")
    facts = read_facts(path)
    model = load_model(facts, paged_forward.plan_for(path), select())
    pool = KVPool.uniform(facts.num_layers, 8, 16, facts.num_kv_heads, facts.head_dim, torch.float32, "cpu")
    ids = list(range(20, 50))
    page_table = np.array([[3, 5]], np.int32)  # positions 0..15 are in page 3, positions 16..31 in page 5
    expected = tiny_checkpoints.reference(path, ids)

    for start, end in ((0, 29), (29, 30)):  # the prompt, then one more token
        batch = paged_forward.batch_of([ids[start:end]], [start], page_table, pool)
        hidden = model(batch)  # [T, E]
        logits = model.logits(hidden)  # float32 [T, V]
        assert (logits - expected[start:end]).abs().max() < 1e-4
