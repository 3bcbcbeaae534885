"""Models that transformers creates in several threads are complete."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers.initialization import no_tie_weights

import paged_forward
import tiny_checkpoints
from ops.select import select
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.models.by_transformers.facts import quiet


def test_a_model_waits_for_another_threads_model() -> None:
    """While transformers creates a model, no model of the process can tie its weights."""
    path = tiny_checkpoints.cached("qwen3", tie_word_embeddings=True)
    facts = read_facts(path, {}, model_impl="transformers")
    plan = paged_forward.plan_for(path, by_transformers=True)
    creates, may_end = threading.Event(), threading.Event()

    def create() -> None:
        with quiet(), no_tie_weights():
            creates.set()
            may_end.wait(60)

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(create)
        assert creates.wait(60)
        loading = threads.submit(load_model, facts, plan, select())
        threading.Timer(0.2, may_end.set).start()
        model: Any = loading.result(60)
        assert may_end.is_set()
        other.result()
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
