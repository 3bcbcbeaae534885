"""Whole models with all Triton kernels in the interpreter: what the layers hand over, in pages and chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_memory
import paged_forward
import tiny_checkpoints
from ops.attention import AttentionMetadata
from ops.backends import GPU_OPERATIONS, SMALL_OPERATIONS
from ops.select import select
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import collect_specs

pytestmark = [pytest.mark.interpreter, pytest.mark.timeout(400)]  # a model takes minutes on a busy machine

CHOICES: dict[str, str] = dict.fromkeys(("attention", *SMALL_OPERATIONS, *GPU_OPERATIONS), "with_triton")
FURTHER = ("mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2")
IDS = [[5, 9, 2, 30, 7, 7, 1, 12, 3, 40, 8, 11, 6, 19, 33, 2, 5, 9], [4, 4, 17, 23, 3, 1, 2]]


def test_the_choices_are_those_of_triton() -> None:
    chosen = select(CHOICES)
    for operation in (
        "store",
        "rms_norm",
        "add_rms_norm",
        "rotate",
        "rotate_store",
        "rotate_store_latent",
        "gate",
        "embed",
        "as_logits",
        "route",
        "mix",
        "add_low_rank",
    ):
        assert getattr(chosen, operation).__module__.rpartition(".")[2] in (
            "with_triton",
            "triton_fused",
            "triton_latent",
        )
    assert chosen.attend is not select().attend


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)],
)
def test_every_logit_equals_that_of_native_kernels(family: str) -> None:
    arguments = {"sliding_window": 6} if family == "mistral" else {}
    path = tiny_checkpoints.cached(family, **arguments)
    models = [paged_forward.load(path, kernels=select(choices)) for choices in (CHOICES, None)]
    found, wanted = (paged_forward.all_logits(model, IDS, page_size=4) for model in models)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "model"), [("llama", "Llama-3.1-8B"), pytest.param("qwen3", "Qwen3-8B", marks=pytest.mark.slow)]
)
def test_a_step_launches_what_the_model_of_a_gpu_assumes(family: str, model: str) -> None:
    """See `just study gpu-model`. Sampling is not part of the forward."""
    from bench.gpu_model import MODELS, step

    products: list[int] = []
    chosen = select(CHOICES)

    def linear(*operands: Any) -> Tensor:
        products.append(1)
        return chosen.linear(*operands)

    decoder = paged_forward.load(tiny_checkpoints.cached(family), kernels=replace(chosen, linear=linear))
    pool = KVPool(collect_specs(decoder), 8, 4, torch.float32, "cpu")
    attention = AttentionMetadata.build([20], [1], np.arange(6, dtype=np.int32)[None], 4)
    ids = torch.tensor([5])
    before = kernel_memory.num_checked
    decoder(ForwardBatch(token_ids=ids, positions=ids + 15, attention=attention, cache=pool))
    assumed = step(MODELS[model]._replace(layers=len(decoder.layers)), 1, 1)
    expected = [kernel for kernel in assumed if not kernel.name.startswith(("sample", "LM head", "logits"))]
    assert kernel_memory.num_checked - before + len(products) == len(expected)
