"""The interface of a quantisation method: how a weight is read, prepared and multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpp_kernels
import paged_forward
import tiny_checkpoints
from ops.matmul.grouped import GroupedWeight
from ops.matmul.int8 import Int8
from ops.matmul.with_cpp import PackedWeight8
from ops.moe import Mixture
from ops.select import Kernels, select
from runtime.layers.build import Build
from runtime.layers.linear import Linear
from runtime.layers.quantization import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.weight import Shard, SubLayer, frozen, parameter
from runtime.loading.parameters import collect_shards

BATCH: Any = None  # a linear layer without adapters does not read the batch
X = torch.randn(3, 12)


class RowScales:
    """Integers with one scale per output, both read from the checkpoint."""

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        layer.weight = parameter(layout.out_size, layout.in_size, dtype=torch.int8)
        layer.scale = parameter(layout.out_size, dtype=torch.float32)

    def shards(self, layer: Any, layout: LinearLayout) -> Iterator[Shard]:
        row = 0
        for each, rows in zip(layout.sub_layers, layout.rows, strict=True):
            ranges = (each.in_tensor(rows), layout.columns)
            axes = (each.axis, layout.in_axis)
            yield Shard(f"{each.name}.weight", layer.weight, row, rows.size, axes, ranges)
            yield Shard(f"{each.name}.weight_scale", layer.scale, row, rows.size, axes[:1], ranges[:1])
            row += rows.size

    def prepare(self, layer: Any, kernels: Kernels) -> None:
        layer.weight = frozen(layer.weight.float())

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        product = kernels.linear(x, layer.weight) * layer.scale
        return product if bias is None else product + bias

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return mixture

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return kernels.prepare(weight)

    def keeps(self, layout: LinearLayout) -> bool:
        return False

    def keeps_experts(self, layout: LinearLayout) -> bool:
        return False

    def take(self, layer: nn.Module) -> GroupedWeight:
        raise AssertionError("nothing is kept")


class Rank:
    rank, size = 1, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        raise NotImplementedError


def linear(method: QuantizationMethod, tensors: dict[str, Tensor], *, cut: bool = False) -> Linear:
    parts = [SubLayer("q", 8, "heads", 2), SubLayer("k", 4, "kv_heads", 2)]
    made = Linear(12, parts, Build(select(), quantization=method), bias=True)
    if cut:
        made.split(Rank())
    for name, shards in collect_shards(made).items():
        for shard in shards:
            shard.target.copy_(tensors[name][shard.cut])
    made.prepare()
    return made


def test_a_method_says_how_weights_are_read_prepared_and_multiplied() -> None:
    stored, plain = {}, {}
    for name, size in (("q", 8), ("k", 4)):
        whole, scale = torch.randint(-127, 128, (size, 12), dtype=torch.int8), torch.rand(size)
        stored |= {f"{name}.weight": whole, f"{name}.weight_scale": scale, f"{name}.bias": torch.randn(size)}
        plain |= {f"{name}.weight": whole * scale[:, None], f"{name}.bias": stored[f"{name}.bias"]}
    wanted = linear(Unquantized(), plain)(X, BATCH)
    torch.testing.assert_close(linear(RowScales(), stored)(X, BATCH), wanted, rtol=1e-5, atol=1e-3)
    rank = linear(RowScales(), stored, cut=True)(X, BATCH)
    torch.testing.assert_close(rank, torch.cat([wanted[:, 4:8], wanted[:, 10:12]], dim=1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("in_cpp", [False, True])
def test_8_bits_are_for_every_product_but_the_routers(in_cpp: bool) -> None:
    choices = {"matmul": "int8"}
    if in_cpp:
        cpp_kernels.library()
        choices = cpp_kernels.CHOICES
    path = tiny_checkpoints.cached("qwen3_moe")
    model: Any = paged_forward.load(path, kernels=select(choices), quantization="w8a8_int8")
    plain: Any = paged_forward.load(path)
    rounded = (Int8, PackedWeight8)
    for layer, other in zip(model.layers, plain.layers, strict=True):
        assert isinstance(layer.attention.qkv.weight, rounded)
        assert isinstance(layer.attention.out.weight, rounded)
        assert not isinstance(layer.mlp.router.weight, rounded)
        x = torch.randn(5, 32)
        found, wanted = layer.mlp(x, BATCH), other.mlp(x, BATCH)
        assert isinstance(layer.mlp.gate_up, PackedWeight8) == isinstance(layer.mlp.down, PackedWeight8) == in_cpp
        torch.testing.assert_close(found, wanted, atol=0.03 * wanted.abs().max().item() if in_cpp else 1e-5, rtol=0)
    assert isinstance(model.head.prepared, rounded)
