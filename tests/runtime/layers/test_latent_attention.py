"""Latent attention in whole models: absorbed and expanded, in every kind of step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cpp_kernels
import greedy
import paged_forward
import ranks_in_threads
import tiny_checkpoints
from model_mutations import put
from model_variants import VARIANTS
from ops.select import select
from runtime.layers import latent_attention
from runtime.layers.build import Build
from runtime.layers.latent_attention import LatentAttention
from runtime.modeling.decoder import Decoder
from serve import Engine

THRESHOLD = 1e-4  # as in tests/runtime/models/test_parity.py
IDS = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(5)).tolist()
NAMES = ("deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "deepseek_v3-yarn", "glm4_moe_lite", "minicpm3")
CUTS = {"whole": (60,), "a cached prefix": (32, 28), "chunks": (20, 20, 20), "a short end": (58, 1, 1)}


@cache
def expected(name: str) -> Tensor:
    return tiny_checkpoints.reference(path_of(name), IDS)


def path_of(name: str) -> str:
    return tiny_checkpoints.cached(VARIANTS[name].family, **VARIANTS[name].config)


def in_steps(model: Decoder, counts: tuple[int, ...]) -> Tensor:
    """Return the logits [T, V] of one sequence that is computed in steps of these sizes."""
    pool = paged_forward.pool_for(model, 4, 16)
    table = np.array([[2, 0, 3, 1]], np.int32)
    logits, done = [], 0
    for count in counts:
        logits += paged_forward.compute(model, [IDS[done : done + count]], [done], table, pool)
        done += count
    return torch.cat(logits)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("choices", [None, cpp_kernels.CHOICES], ids=["torch", "C++"])
@pytest.mark.parametrize("name", NAMES)
def test_every_logit_equals_transformers_absorbed_and_expanded(name: str, choices: Any, cut: str) -> None:
    if choices:
        cpp_kernels.library()
    model = paged_forward.load(path_of(name), kernels=select(choices))
    for expand_from in (None, 2):
        put("attention", expand_from=expand_from)(model)
        assert (in_steps(model, CUTS[cut]) - expected(name)).abs().max() < THRESHOLD


@pytest.mark.parametrize("choices", [None, cpp_kernels.CHOICES], ids=["torch", "C++"])
@pytest.mark.parametrize("weights", ["absorbing", "expanding"])
def test_each_way_needs_weights_of_its_own(choices: Any, weights: str) -> None:
    if choices:
        cpp_kernels.library()
    model = paged_forward.load(path_of("deepseek_v3"), kernels=select(choices))
    put("attention", expand_from=30)(model)
    for layer in model.layers:
        getattr(layer.get_submodule("attention"), weights).data.zero_()
    wrong = (in_steps(model, (40, 20)) - expected("deepseek_v3")).abs().amax(-1) > THRESHOLD
    assert wrong.any()
    if weights == "absorbing":
        assert not wrong[:40].any()  # these tokens are expanded


@pytest.mark.parametrize("choices", [None, cpp_kernels.CHOICES], ids=["torch", "C++"])
def test_two_ranks_expand_their_own_heads(choices: Any) -> None:
    if choices:
        cpp_kernels.library()
    path = path_of("deepseek_v3")

    def compute(rank: ranks_in_threads.Rank) -> Tensor:
        model = paged_forward.load(path, group=rank, kernels=select(choices))
        put("attention", expand_from=2)(model)
        return in_steps(model, (25, 35))

    found = ranks_in_threads.Ranks(2).run(compute)[0]
    assert (found - expected("deepseek_v3")).abs().max() < THRESHOLD


@pytest.mark.parametrize("choices", [None, cpp_kernels.CHOICES], ids=["torch", "C++"])
def test_keys_that_are_cheaper_absorbed_are_never_expanded(choices: Any) -> None:
    if choices:
        cpp_kernels.library()
    path = tiny_checkpoints.cached("deepseek_v3", kv_lora_rank=8)
    model = paged_forward.load(path, kernels=select(choices))
    attention: Any = model.layers[0].get_submodule("attention")
    assert attention.expand_from is None
    assert not attention.expanding.numel()
    assert (in_steps(model, (40, 20)) - tiny_checkpoints.reference(path, IDS)).abs().max() < THRESHOLD


def test_nothing_is_expanded_on_a_gpu_or_where_that_is_asked_for() -> None:
    def made(device: str, always_absorbed: bool = False) -> LatentAttention:
        build: Any = Build(select(), device=torch.device(device), always_absorbed=always_absorbed)
        return LatentAttention(
            "a", 0, 64, 4, build, rank=512, query_rank=None, nope_dim=128, rope_dim=64, value_dim=128,
            rope=None, scale=1.0, bias=False,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    assert made("cpu").expand_from == 171
    assert made("meta").expand_from is None
    assert made("cpu", always_absorbed=True).expand_from is None


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
async def test_tokens_are_the_same_alone_in_a_batch_cached_and_in_chunks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpp_kernels.library()
    monkeypatch.setattr(latent_attention, "min_tokens_to_expand", lambda *sizes: 7)
    prompts, wanted = greedy.prompts(), greedy.reference(family)
    path = greedy.model_path(family)
    for options in ({}, {"chunked_prefill_size": 16}, {"disable_radix_cache": True}):
        async with Engine(path, skip_tokenizer_init=True, page_size=4, dtype="float32", **options) as engine:
            for _ in range(2):  # the second time from the cache
                answers = await engine.generate(input_ids=prompts, sampling_params=greedy.GREEDY)
                assert [answer["output_ids"] for answer in answers] == wanted
            alone = await engine.generate(input_ids=prompts[7], sampling_params=greedy.GREEDY)
            assert alone["output_ids"] == wanted[7]


async def test_an_engine_that_is_asked_to_expands_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "min_tokens_to_expand", lambda *sizes: pytest.fail("expanded"))
    wanted = greedy.reference("deepseek_v3")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32"}
    path = greedy.model_path("deepseek_v3")
    async with Engine(path, flashinfer_mla_disable_ragged=True, **options) as engine:
        answers = await engine.generate(input_ids=greedy.prompts(), sampling_params=greedy.GREEDY)
    assert [answer["output_ids"] for answer in answers] == wanted
