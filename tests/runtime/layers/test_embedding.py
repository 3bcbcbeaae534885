"""Token embeddings and logits of a vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ops.select import Kernels, select
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.lm_head import LMHead


def embedding(kernels: Kernels | None = None, **options: Any) -> Embedding:
    layer = Embedding("embed", 7, 4, Build(kernels or select()), **options)
    layer.weight.copy_(torch.randn(7, 4))
    return layer


def of_ids(token_ids: list[int], **changes: Any) -> ForwardBatch:
    nothing: Any = None  # an embedding reads only the tokens
    ids = torch.tensor(token_ids)
    return ForwardBatch(token_ids=ids, positions=ids, attention=nothing, cache=nothing, **changes)


def test_vectors_are_scaled_and_the_scale_is_rounded_as_the_weights_are() -> None:
    embed = embedding(scale=3.3).bfloat16()
    embed.prepare()
    scale = torch.tensor(3.3, dtype=torch.bfloat16)
    assert scale.item() != 3.3
    assert torch.equal(embed(of_ids([6, 0])), embed.weight[[6, 0]] * scale)


def test_vectors_of_the_batch_take_the_place_of_ids() -> None:
    embed, vectors = embedding(scale=3.0), torch.randn(3, 4)
    whole = torch.ones(3, dtype=torch.bool)
    assert torch.equal(embed(of_ids([99, 99, 99], input_embeds=vectors, embeds_mask=whole)), vectors)
    mask = torch.tensor([True, False, True])
    mixed = embed(of_ids([99, 5, 99], input_embeds=vectors, embeds_mask=mask))
    assert torch.equal(mixed[[0, 2]], vectors[[0, 2]])
    torch.testing.assert_close(mixed[1], 3 * embed.weight[5])


def test_tied_head_has_no_weights_of_its_own() -> None:
    embed = embedding()
    head = LMHead("lm_head", embed, Build(select()), tied=True)
    hidden = torch.randn(3, 4)
    assert list(head.shards()) == list(head.parameters()) == []
    torch.testing.assert_close(head(hidden), hidden @ embed.weight.T)


def test_logits_are_scaled_then_capped() -> None:
    embed = embedding()
    hidden = torch.randn(3, 4)
    head = LMHead("lm_head", embed, Build(select()), tied=True, scale=3.0, soft_cap=2.0)
    expected = 2 * torch.tanh(hidden @ embed.weight.T * 3 / 2)
    torch.testing.assert_close(head(hidden), expected)
    assert head(hidden).abs().max() <= 2


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = LMHead("lm_head", embedding().bfloat16(), Build(select()), tied=True)
    assert head(torch.randn(1, 4).bfloat16()).dtype == torch.float32


def test_a_tied_head_in_another_layout_leaves_the_embedding_and_claims_no_tensor() -> None:
    kernels = replace(select(), prepare=torch.clone)
    embed = embedding(kernels)
    head = LMHead("lm_head", embed, Build(kernels), tied=True)
    embed.prepare()
    assert head.weight is None
    assert head.prepared.data_ptr() != embed.weight.data_ptr()
    assert list(head.shards()) == []
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), hidden @ embed.weight.T)


def test_a_tied_head_in_a_layout_that_the_embedding_reads_is_held_once() -> None:
    def embed_backwards(token_ids: Tensor, weight: Tensor, scale: float | None, media: None) -> Tensor:
        return weight.flip(0)[token_ids]

    def logits_backwards(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden @ weight.flip(0).T

    kernels = replace(
        select(),
        prepare=lambda weight: weight.flip(0),
        reads=lambda prepared: True,
        embed=embed_backwards,
        logits=logits_backwards,
    )
    embed = embedding(kernels)
    head = LMHead("lm_head", embed, Build(kernels), tied=True)
    plain, hidden = embed.weight.clone(), torch.randn(3, 4)
    embed.prepare()
    assert head.weight is None
    assert head.prepared is embed.weight
    torch.testing.assert_close(embed(of_ids([6, 0])), plain[[6, 0]])
    torch.testing.assert_close(head(hidden), hidden @ plain.T)


def test_a_head_with_weights_of_its_own_leaves_the_embedding_alone() -> None:
    kernels = replace(select(), prepare=torch.clone, reads=lambda prepared: True)
    embed = embedding(kernels)
    head = LMHead("lm_head", embed, Build(kernels), tied=False)
    before = embed.weight
    for end in (embed, head):
        end.prepare()
    assert embed.weight is before
    assert head.prepared is not before
