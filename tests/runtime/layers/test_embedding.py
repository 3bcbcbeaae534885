from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ops.select import select
from runtime.layers.embedding import Embedding, LMHead


def embedding() -> Embedding:
    layer = Embedding("embed", 7, 4, select())
    layer.weight.copy_(torch.randn(7, 4))
    return layer


def test_tied_head_has_no_weights_of_its_own() -> None:
    embed = embedding()
    head = LMHead("lm_head", embed, select(), tied=True)
    hidden = torch.randn(3, 4)
    assert list(head.shards()) == list(head.parameters()) == []
    torch.testing.assert_close(head(hidden), hidden @ embed.weight.T)


def test_logits_are_scaled_then_capped() -> None:
    embed = embedding()
    hidden = torch.randn(3, 4)
    head = LMHead("lm_head", embed, select(), tied=True, scale=3.0, soft_cap=2.0)
    expected = 2 * torch.tanh(hidden @ embed.weight.T * 3 / 2)
    torch.testing.assert_close(head(hidden), expected)
    assert head(hidden).abs().max() <= 2


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = LMHead("lm_head", embedding().bfloat16(), select(), tied=True)
    assert head(torch.randn(1, 4).bfloat16()).dtype == torch.float32


def test_a_tied_head_in_another_layout_leaves_the_embedding_and_claims_no_tensor() -> None:
    embed = embedding()
    head = LMHead("lm_head", embed, replace(select(), prepare=torch.clone), tied=True)
    head.prepare()
    assert head.weight is not None
    assert head.weight.data_ptr() != embed.weight.data_ptr()
    assert list(head.shards()) == []
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), hidden @ embed.weight.T)


def test_a_tied_head_in_a_layout_that_the_embedding_reads_is_held_once() -> None:
    def embed_backwards(token_ids: Tensor, weight: Tensor, first_id: int | None = None) -> Tensor:
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
    embed = embedding()
    embed.kernels = kernels
    head = LMHead("lm_head", embed, kernels, tied=True)
    plain, hidden = embed.weight.clone(), torch.randn(3, 4)
    head.prepare()
    assert head.weight is None
    assert head.prepared is embed.weight
    torch.testing.assert_close(embed(torch.tensor([6, 0])), plain[[6, 0]])
    torch.testing.assert_close(head(hidden), hidden @ plain.T)


def test_a_head_with_weights_of_its_own_leaves_the_embedding_alone() -> None:
    embed = embedding()
    kernels = replace(select(), prepare=torch.clone, reads=lambda prepared: True)
    head = LMHead("lm_head", embed, kernels, tied=False)
    before = embed.weight
    head.prepare()
    assert embed.weight is before
    assert head.prepared is not before
