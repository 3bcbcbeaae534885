"""The division of layers into shards, whose results together equal those of the whole layer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops.matmul import with_onednn
from ops.select import select
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.lm_head import LMHead
from runtime.layers.sharding import shard_range
from runtime.layers.weight import SubLayer

BATCH: Any = None  # a linear layer without adapters does not read the batch


class FakeGroup:
    """A rank whose all-reduce returns its own part; the test adds the parts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gathered: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        self.gathered.append(x)
        return None


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_spans_cover_an_axis_once_and_never_cut_a_unit(units: int, unit: int, size: int):
    ranges = [shard_range("heads", units * unit, unit, rank, size) for rank in range(size)]
    assert ranges[0].start == 0
    assert all(a.start + a.size == b.start for a, b in pairwise(ranges))
    assert ranges[-1].start + ranges[-1].size == units * unit
    assert all(each.size % unit == 0 for each in ranges)
    assert max(s.size for s in ranges) - min(s.size for s in ranges) <= unit


def test_kv_heads_are_repeated_when_there_are_more_ranks():
    ranges = [shard_range("kv_heads", 2 * 8, 8, rank, 4) for rank in range(4)]
    assert [(s.start, s.size) for s in ranges] == [(0, 8), (0, 8), (8, 8), (8, 8)]


def test_unnamed_axis_is_whole_everywhere():
    assert shard_range(None, 12, 1, 1, 3).whole


def fill(module, tensors: dict[str, Tensor]) -> None:
    for shard in module.shards():
        shard.target.copy_(tensors[shard.name][shard.cut])


def of_ids(token_ids: Tensor) -> ForwardBatch:
    nothing: Any = None  # an embedding reads only the tokens
    return ForwardBatch(token_ids=token_ids, positions=token_ids, attention=nothing, cache=nothing)


PACKS = pytest.mark.skipif(not with_onednn.packs(torch.float32), reason="oneDNN packs no weights here")
MATMULS = ["native", pytest.param("with_onednn", marks=PACKS)]


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("size", [2, 3])
def test_sum_over_ranks_of_a_linear_cut_along_its_input(size: int, matmul: str):
    tensors = {"o.weight": torch.randn(5, 12), "o.bias": torch.randn(5)}
    whole = Linear(12, [SubLayer("o", 5)], Build(select()), bias=True, in_axis="heads", in_unit=2)
    fill(whole, tensors)
    x = torch.randn(4, 12)
    total = torch.zeros(4, 5)
    for rank in range(size):
        build = Build(select({"matmul": matmul}))
        part = Linear(12, [SubLayer("o", 5)], build, bias=True, in_axis="heads", in_unit=2)
        part.split(FakeGroup(rank, size))
        fill(part, tensors)
        part.prepare()
        assert part.weight.is_mkldnn == (matmul == "with_onednn")
        total += part(x[:, shard_range("heads", 12, 2, rank, size).slice], BATCH)
    torch.testing.assert_close(total, whole(x, BATCH))


@pytest.mark.parametrize("vocab_size", [8, 7])
def test_vocabulary_in_parts(vocab_size: int):
    tensors = {"e.weight": torch.randn(vocab_size, 4), "h.weight": torch.randn(vocab_size, 4)}
    ids, hidden = torch.arange(vocab_size), torch.randn(3, 4)
    looked_up, logits = torch.zeros(vocab_size, 4), []
    for rank in range(3):
        group = FakeGroup(rank, 3)
        embedding = Embedding("e", vocab_size, 4, Build(select()))
        head = LMHead("h", embedding, Build(select()), tied=False)
        for layer in (embedding, head):
            layer.split(group)
            fill(layer, tensors)
        looked_up += embedding(of_ids(ids))
        own = head(hidden)
        assert group.gathered[0].shape == (3, -(-vocab_size // 3))
        logits.append(own)
    torch.testing.assert_close(looked_up, tensors["e.weight"])
    torch.testing.assert_close(torch.cat(logits, 1), hidden @ tensors["h.weight"].T)


@pytest.mark.parametrize("unit", ["rows", "columns"])
def test_each_rank_scales_its_part_of_a_head_like_the_whole(unit: Literal["rows", "columns"]):
    tensors, hidden, logits = {"h.weight": torch.randn(7, 4)}, torch.randn(3, 4), []
    for rank in range(3):
        build = Build(select())
        head = LMHead("h", Embedding("e", 7, 4, build), build, tied=False, unit=unit)
        head.split(FakeGroup(rank, 3))
        fill(head, tensors)
        head.prepare()
        logits.append(head(hidden))
    weight = F.normalize(tensors["h.weight"], dim=1 if unit == "rows" else 0)
    torch.testing.assert_close(torch.cat(logits, 1), hidden @ weight.T)


@PACKS
def test_a_tied_head_packs_no_more_than_its_part_of_the_vocabulary():
    tensors, hidden, logits = {"e.weight": torch.randn(7, 4)}, torch.randn(3, 4), []
    for rank in range(3):
        build = Build(select({"matmul": "with_onednn"}))
        embedding = Embedding("e", 7, 4, build)
        head = LMHead("h", embedding, build, tied=True)
        for layer in (embedding, head):
            layer.split(FakeGroup(rank, 3))
            fill(layer, tensors)
            layer.prepare()
        assert head.prepared.is_mkldnn
        assert head.prepared.shape == embedding.weight.shape
        assert not embedding.weight.is_mkldnn
        logits.append(head(hidden))
    torch.testing.assert_close(torch.cat(logits, 1), hidden @ tensors["e.weight"].T)
