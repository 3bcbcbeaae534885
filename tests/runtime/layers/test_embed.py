from __future__ import annotations

import torch

from ops.select import select
from runtime.layers.embed import Embedding, Head


def embedding() -> Embedding:
    layer = Embedding("embed", 7, 4)
    layer.weight.copy_(torch.randn(7, 4))
    return layer


def test_tied_head_has_no_weights_of_its_own() -> None:
    embed = embedding()
    head = Head("lm_head", embed, select(), tied=True)
    hidden = torch.randn(3, 4)
    assert list(head.pieces()) == list(head.parameters()) == []
    torch.testing.assert_close(head(hidden), hidden @ embed.weight.T)


def test_logits_are_scaled_then_capped() -> None:
    embed = embedding()
    hidden = torch.randn(3, 4)
    head = Head("lm_head", embed, select(), tied=True, scale=3.0, soft_cap=2.0)
    expected = 2 * torch.tanh(hidden @ embed.weight.T * 3 / 2)
    torch.testing.assert_close(head(hidden), expected)
    assert head(hidden).abs().max() <= 2


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = Head("lm_head", embedding().bfloat16(), select(), tied=True)
    assert head(torch.randn(1, 4).bfloat16()).dtype == torch.float32
