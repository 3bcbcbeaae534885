"""Every family in every variant against transformers, and a check that each declared feature affects the logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

import cpp_kernels
import greedy
import paged_forward
import ranks_in_threads
import tiny_checkpoints
from model_mutations import put
from model_variants import VARIANTS
from ops.matmul import with_onednn
from ops.matmul.with_cpp import PackedWeight
from ops.select import select
from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.facts import read_facts
from runtime.modeling.decoder import Decoder
from runtime.models.registry import ARCHITECTURES
from serve import Engine

THRESHOLD = 1e-4  # float32 noise is about 1e-6; the smallest real error so far was 3.5e-4
LENGTHS = (41, 23, 60)


@cache
def expected(name: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return three random sequences, and their logits by transformers."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    return ids, [tiny_checkpoints.reference(path_of(name), sequence) for sequence in ids]


def path_of(name: str) -> str:
    return tiny_checkpoints.cached(VARIANTS[name].family, **VARIANTS[name].config)


def load(name: str, overrides: dict[str, Any] | None = None, choices: Mapping[str, str] | None = None) -> Decoder:
    context = VARIANTS[name].context_length
    changes: dict[str, Any] = {} if context is None else {"context_length": context}
    return paged_forward.load(path_of(name), overrides, kernels=select(choices), **changes)


def largest_error(name: str, model: Decoder, page_size: int) -> float:
    ids, logits = expected(name)
    computed = paged_forward.all_logits(model, ids, page_size)
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(computed, logits))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_logit_equals_transformers(name: str, page_size: int) -> None:
    assert largest_error(name, load(name), page_size) < THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_checkpoints.CONFIGS)
def test_in_bfloat16_most_tokens_stay_close(family: str) -> None:
    """On average, the logits of half of the tokens differ by less than 3 % of their standard deviation. Some other
    tokens get another expert, because a router's two best experts are nearly equal.
    """
    path = tiny_checkpoints.cached(family)
    ids = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    [found] = paged_forward.all_logits(paged_forward.load(path, dtype="bfloat16"), [ids], 16)
    wanted = tiny_checkpoints.reference(path, ids)
    assert ((found - wanted).abs().mean(-1) / wanted.std(-1)).median() < 0.03


@pytest.mark.skipif(not with_onednn.packs(torch.float32), reason="oneDNN packs no weights here")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_logit_equals_transformers_with_packed_weights(name: str) -> None:
    model = load(name, choices={"matmul": "with_onednn"})
    assert model.head is not None
    assert model.head.prepared.is_mkldnn
    assert largest_error(name, model, 16) < THRESHOLD


@pytest.mark.parametrize("name", VARIANTS)
def test_every_logit_equals_transformers_with_kernels_in_cpp(name: str) -> None:
    cpp_kernels.library()
    model = load(name, choices=cpp_kernels.CHOICES)
    assert model.head is not None
    assert isinstance(model.head.prepared, PackedWeight)
    assert largest_error(name, model, 16) < THRESHOLD


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", tiny_checkpoints.CONFIGS)
def test_every_logit_equals_transformers_with_attention_in_cpp(family: str, page_size: int) -> None:
    cpp_kernels.library()
    path = tiny_checkpoints.cached(family, head_dim=16)
    model = paged_forward.load(path, kernels=select(cpp_kernels.CHOICES))
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    found = paged_forward.all_logits(model, sequences, page_size)
    for ids, logits in zip(sequences, found, strict=True):
        assert (logits - tiny_checkpoints.reference(path, ids)).abs().max() < THRESHOLD


FIRST = [
    next(name for name, variant in VARIANTS.items() if variant.family == family) for family in tiny_checkpoints.CONFIGS
]


@pytest.mark.parametrize("name", [*FIRST, "granitemoehybrid-dense"])  # one group for all heads
def test_two_ranks_together_give_every_logit(name: str) -> None:
    path, ranks = path_of(name), ranks_in_threads.Ranks(2)
    ids, logits = expected(name)

    def compute(rank: ranks_in_threads.Rank) -> list[torch.Tensor]:
        return paged_forward.all_logits(paged_forward.load(path, group=rank), ids, 16)

    for ours, theirs in zip(ranks.run(compute)[0], logits, strict=True):
        assert (ours - theirs).abs().max() < THRESHOLD


MUTATIONS = [(name, feature) for name, variant in VARIANTS.items() for feature in variant.mutations]


@pytest.mark.parametrize(("name", "feature"), MUTATIONS)
def test_a_model_without_the_feature_is_caught(name: str, feature: str) -> None:
    model = load(name)
    VARIANTS[name].mutations[feature](model)
    assert largest_error(name, model, 16) > THRESHOLD


OVERRIDES = [(name, feature) for name, variant in VARIANTS.items() for feature in variant.overrides]


@pytest.mark.parametrize(("name", "feature"), OVERRIDES)
def test_a_configuration_without_the_feature_is_caught(name: str, feature: str) -> None:
    model = load(name, VARIANTS[name].overrides[feature])
    assert largest_error(name, model, 16) > THRESHOLD


def test_the_first_gemma_checkpoints_mean_the_tanh_approximation_by_gelu() -> None:
    assert largest_error("gemma", load("gemma", {"hidden_act": "gelu"}), 16) < THRESHOLD
    model = load("gemma")
    put("mlp", activation="gelu")(model)
    assert largest_error("gemma", model, 16) > THRESHOLD


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_encoders_made_of_gemma_are_refused(family: str) -> None:
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        load(family, {"use_bidirectional_attention": True})


@pytest.mark.parametrize("family", greedy.FAMILIES)
async def test_tokens_served_over_the_cpu_graph_equal_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpp_kernels.library()
    called: list[int] = []  # number of tokens of each call of the model
    forward = Decoder.forward

    def counted(self: Decoder, batch: ForwardBatch) -> torch.Tensor:
        called.append(batch.num_tokens)
        return forward(self, batch)

    monkeypatch.setattr(Decoder, "forward", counted)
    with caplog.at_level(logging.INFO, "penstock.core"):
        async with Engine(greedy.model_path(family), skip_tokenizer_init=True) as engine:
            answers = await engine.generate(input_ids=greedy.prompts(), sampling_params=greedy.GREEDY)
    assert [answer["output_ids"] for answer in answers] == greedy.reference(family)
    reason = [text for text in caplog.messages if text.startswith("Steps are computed operation by operation")]
    assert not reason
    assert len(called) == 1  # only during the capture


def test_every_registered_architecture_has_a_variant() -> None:
    """Two names of one entry need one variant."""
    entries = {id(each) for each in ARCHITECTURES.values()}
    tested = {read_facts(path_of(name)).architecture for name in VARIANTS}
    served = {read_facts(greedy.model_path(family)).architecture for family in greedy.FAMILIES}
    for names in (tested, served):
        assert {id(ARCHITECTURES[name]) for name in names} == entries
