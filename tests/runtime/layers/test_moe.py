"""A mixture of experts as a layer, whole and divided among ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.select import select
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.layers.sharding import TensorParallelGroup
from runtime.loading.parameters import collect_shards, split
from runtime.modeling.config import Config
from runtime.models.qwen2 import has_experts
from runtime.models.registry import config_of

SIZE, INNER, EXPERTS = 6, 8, 5
BATCH: Any = None  # these layers do not read the batch without adapters
TENSORS = {
    "m.gate.weight": torch.randn(EXPERTS, SIZE),
    **{f"m.experts.{x}.{part}.weight": torch.randn(INNER, SIZE) for x in range(5) for part in ("gate_proj", "up_proj")},
    **{f"m.experts.{x}.down_proj.weight": torch.randn(SIZE, INNER) for x in range(5)},
}


class Together:
    """A rank whose all-reduce the test computes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        raise NotImplementedError


def layer(group: TensorParallelGroup | None = None) -> MoE:
    made = MoE("m", SIZE, INNER, EXPERTS, "silu", Build(select()), routing=Routing(2, True))
    if group is not None:
        split(made, group)
    shards = collect_shards(made)
    assert shards.keys() == TENSORS.keys()
    for name, (shard,) in shards.items():
        shard.target.copy_(TENSORS[name][shard.cut])
    made.prepare()
    return made


def test_a_token_is_computed_by_its_experts_alone() -> None:
    x, made = torch.randn(1, SIZE), layer()
    wanted, chosen = made(x, BATCH), made.router(x, BATCH).topk(2).indices[0].tolist()
    for expert in range(EXPERTS):
        other = layer()
        other.down[expert] = 0
        assert torch.equal(other(x, BATCH), wanted) == (expert not in chosen)


@pytest.mark.parametrize("size", [2, 3])
def test_experts_are_cut_along_their_inner_dimension(size: int) -> None:
    x = torch.randn(9, SIZE)
    parts = [layer(Together(rank, size))(x, BATCH) for rank in range(size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), layer()(x, BATCH), atol=1e-5, rtol=1e-5)
    assert sum(layer(Together(rank, size)).gate_up.shape[1] for rank in range(size)) == 2 * INNER


def config(**values: object) -> Config:
    return config_of({"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, **values})


def test_the_configuration_says_which_layers_have_experts() -> None:
    assert [has_experts(config(), index) for index in range(3)] == [True] * 3
    assert [has_experts(config(decoder_sparse_step=2), index) for index in range(4)] == [False, True] * 2
    assert [has_experts(config(mlp_only_layers=[0, 2]), index) for index in range(4)] == [False, True] * 2


def test_layers_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="mlp_only_layers must be a list of layer numbers"):
        has_experts(config(mlp_only_layers="all"), 0)
