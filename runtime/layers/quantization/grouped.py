"""Weights that a checkpoint holds in 4 bits, kept so: no entry of METHODS, for the checkpoint alone decides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ops.matmul.grouped import WHOLE, GroupedWeight
from ops.moe import Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.sharding import ShardRange
from runtime.layers.weight import Shard, frozen, parameter


class KeptGroups(Unquantized):
    """Layers all of whose weights are in `groups` (name -> inputs in a group) stay in 4 bits; others are dequantised.

    A rank's columns must be whole groups. Products are in `dtype`. `tables` say what the codes of a weight stand for
    where they are not whole numbers. Without `experts` mixtures are dequantised. What is dequantised is left to the
    method `rest`. With `rounded_rows` activations are rounded to 8 bits.
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        dtype: torch.dtype,
        tables: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
        *,
        rest: QuantizationMethod | None = None,
        rounded_rows: bool = False,
        experts: bool = True,
    ) -> None:
        self._keeps_experts = experts
        self._rest = rest or Unquantized()
        self._rounded_rows = rounded_rows
        self._groups = groups
        self._tables = tables
        self._dtype = dtype

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        group, held = self._group(layout), _held(layer)
        held.table = self._table(layout)
        parts: dict[str, nn.Parameter | None] = dict.fromkeys(("weight", "codes", "scales", "shifts"))
        for name in parts:
            setattr(layer, name, None)
        if group is None:
            return super().allocate(layer, layout)
        out_size, in_size = layout.out_size, layout.in_size
        layer.codes = parameter(out_size, in_size, dtype=torch.uint8)
        layer.scales = parameter(out_size, in_size // group, dtype=torch.float32)
        layer.shifts = parameter(out_size, in_size // group, dtype=torch.float32)
        return None

    def shards(self, layer: nn.Module, layout: LinearLayout) -> Iterator[Shard]:
        group = self._group(layout)
        if group is None:
            yield from super().shards(layer, layout)
            return
        held: Any = layer
        columns, row = layout.columns, 0
        groups = ShardRange(columns.start // group, columns.size // group, columns.full // group)
        for each, rows in zip(layout.sub_layers, layout.rows, strict=True):
            axes = (each.axis, layout.in_axis)
            for part, filled, taken in (
                ("codes", held.codes, columns),
                ("scales", held.scales, groups),
                ("shifts", held.shifts, groups),
            ):
                ranges = (each.in_tensor(rows), taken)
                yield Shard(f"{each.name}.weight.{part}", filled, row, rows.size, axes, ranges)
            row += rows.size

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        held: Any = layer
        if held.codes is None:
            return super().prepare(layer, kernels)
        held.weight = frozen(kernels.prepare_grouped(self.take(layer), self._dtype))
        return None

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return self._rest.prepare_weight(weight, kernels)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return self._rest.prepare_experts(mixture, kernels)

    def keeps(self, layout: LinearLayout) -> bool:
        return self._keeps_experts and self._group(layout) is not None

    def take(self, layer: nn.Module) -> GroupedWeight:
        held: Any = layer
        shifts = held.shifts.detach()
        shifted = shifts if bool(shifts.any()) else None
        codes, scales = held.codes.detach(), held.scales.detach()
        held.codes = held.scales = held.shifts = None
        return GroupedWeight(codes, scales, shifted, held.table, self._rounded_rows)

    def _group(self, layout: LinearLayout) -> int | None:
        """That of all sub-layers; None where they differ, or the layer cannot be kept."""
        groups = {
            self._groups.get(f"{each.name}.weight") if each.tensor_rows is None else None
            for each in layout.sub_layers
        }
        group, columns = groups.pop() if len(groups) == 1 else None, layout.columns
        if (
            not group
            or self._table(layout) is None
            or group % 8
            or columns.start % group
            or columns.size % group
        ):
            return None
        return group

    def _table(self, layout: LinearLayout) -> tuple[float, ...] | None:
        """What the codes of all sub-layers stand for; None where that differs."""
        tables = {self._tables.get(f"{each.name}.weight", WHOLE) for each in layout.sub_layers}
        return tables.pop() if len(tables) == 1 else None


def _held(layer: nn.Module) -> Any:
    """The layer, whose attributes are not all modules and tensors."""
    return layer
