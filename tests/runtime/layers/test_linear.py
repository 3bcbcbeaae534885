from __future__ import annotations

from typing import Any

import torch

from ops.select import select
from runtime.layers.build import Build
from runtime.layers.linear import Linear
from runtime.layers.weight import SubLayer

BUILD = Build(select())
BATCH: Any = None  # a linear layer without adapters does not read the batch


def test_fused_parts_compute_side_by_side_what_they_would_alone() -> None:
    fused = Linear(5, [SubLayer("q", 4, "heads"), SubLayer("k", 2, "kv_heads")], BUILD, bias=True)
    alone = {"q": torch.nn.Linear(5, 4), "k": torch.nn.Linear(5, 2)}
    for shard in fused.shards():
        name, kind = shard.name.split(".")
        shard.target.copy_(getattr(alone[name], kind).data)
    x = torch.randn(3, 5)
    expected = torch.cat([alone["q"](x), alone["k"](x)], dim=-1)
    torch.testing.assert_close(fused(x, BATCH), expected)


def test_pieces_name_tensors_shapes_and_logical_axes() -> None:
    fused = Linear(5, [SubLayer("q", 4, "heads"), SubLayer("k", 2, "kv_heads")], BUILD, bias=True)
    shards = {shard.name: (shard.shape, shard.axes) for shard in fused.shards()}
    assert shards == {
        "q.weight": ((4, 5), ("heads", None)),
        "q.bias": ((4,), ("heads",)),
        "k.weight": ((2, 5), ("kv_heads", None)),
        "k.bias": ((2,), ("kv_heads",)),
    }
    out = Linear(4, [SubLayer("o", 5)], BUILD, in_axis="heads")
    assert [shard.axes for shard in out.shards()] == [(None, "heads")]
