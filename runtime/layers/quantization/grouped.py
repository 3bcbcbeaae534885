"""Weights that stay quantised as in the checkpoint. The checkpoint selects this method; there is no option for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm, common_form, fits_triton
from ops.moe import Mixture
from ops.select import Kernels
from runtime.layers.quantization.method import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.sharding import ShardRange, whole_range
from runtime.layers.weight import Shard, frozen, parameter


class KeptGroups(Unquantized):
    """Keeps a layer's weights quantised if all its sub-layers have the same quantisation form in `forms`.

    Layers whose sub-layers differ in form, and layers whose quantisation groups would be split across ranks, are
    dequantised, and the method `rest` handles them. Products are computed in `dtype`. The kernels also keep experts
    quantised; the C++ kernels (`in_cpp`) also keep embeddings and LM heads. With `rounded_rows` activations are rounded
    to 8 bits. `kept` maps the names of kept weights to their forms.
    """

    def __init__(
        self,
        forms: Mapping[str, GroupForm],
        dtype: torch.dtype,
        *,
        rest: QuantizationMethod | None = None,
        rounded_rows: bool = False,
        in_cpp: bool = True,
    ) -> None:
        self.kept: dict[str, GroupForm] = {}
        self._forms = forms
        self._dtype = dtype
        self._rest = rest or Unquantized()
        self._rounded_rows = rounded_rows
        self._in_cpp = in_cpp

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        form = self._form(layout)
        _untyped(layer).form = form
        for name in ("weight", "codes", "scales", "shifts", "input_scales"):
            setattr(layer, name, None)
        for each in layout.sub_layers:
            self.kept.pop(f"{each.name}.weight", None)
        if form is None:
            return super().allocate(layer, layout)
        self.kept |= {f"{each.name}.weight": form for each in layout.sub_layers}
        groups = (layout.out_size, _groups(layout.columns, form).size)
        layer.codes = parameter(layout.out_size, layout.in_size, dtype=torch.uint8, bits=form.bits)
        bits = 16 if self._in_cpp else 32  # of a packed scale or shift
        small = form.powers or (form.table == E2M1 and not form.shifted)  # scales that Triton's kernels keep in 8 bits
        layer.scales = parameter(*groups, dtype=torch.float32, bits=8 if small and not self._in_cpp else bits)
        if form.shifted:
            layer.shifts = parameter(*groups, dtype=torch.float32, bits=bits)
        if form.input_scaled:
            layer.input_scales = parameter(len(layout.sub_layers), dtype=torch.float32)
        return None

    def shards(self, layer: nn.Module, layout: LinearLayout) -> Iterator[Shard]:
        untyped: Any = layer
        form = untyped.form
        if form is None:
            yield from super().shards(layer, layout)
            return
        columns, groups, row = layout.columns, _groups(layout.columns, form), 0
        for number, (each, rows) in enumerate(zip(layout.sub_layers, layout.rows, strict=True)):
            axes = (each.axis, layout.in_axis)
            if form.input_scaled:
                yield Shard(f"{each.name}.weight.input_scale", untyped.input_scales, number, 1, (None,), ())
            for part, target, inner in (
                ("codes", untyped.codes, columns),
                ("scales", untyped.scales, groups),
                ("shifts", untyped.shifts, groups),
            ):
                if part != "shifts" or form.shifted:
                    ranges = (each.in_tensor(rows), inner)
                    yield Shard(f"{each.name}.weight.{part}", target, row, rows.size, axes, ranges)
            row += rows.size

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        untyped: Any = layer
        if untyped.codes is None:
            return super().prepare(layer, kernels)
        untyped.weight = frozen(kernels.prepare_grouped(self.take(layer), self._dtype))
        return None

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return self._rest.prepare_weight(weight, kernels)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return self._rest.prepare_experts(mixture, kernels)

    def keeps(self, layout: LinearLayout) -> bool:
        return self._in_cpp and self._form(layout) is not None

    def keeps_experts(self, layout: LinearLayout) -> bool:
        return self._form(layout) is not None

    def take(self, layer: nn.Module) -> GroupedWeight:
        untyped: Any = layer
        form = untyped.form
        # Shifts that are all zero are dropped, except in a block of a larger weight: other blocks may have shifts.
        complete = not getattr(layer, "by_itself", False)
        shifted = form.shifted and not (complete and not bool(untyped.shifts.any()))
        shifts = untyped.shifts.detach() if shifted else None
        codes, scales = untyped.codes.detach(), untyped.scales.detach()
        inputs = untyped.input_scales.detach() if form.input_scaled else None
        untyped.codes = untyped.scales = untyped.shifts = untyped.input_scales = None
        kinds = {"bits": form.bits, "floating": form.floating, "powers": form.powers}
        return GroupedWeight(codes, scales, shifts, form.table, self._rounded_rows, **kinds, input_scales=inputs)

    def _form(self, layout: LinearLayout) -> GroupForm | None:
        """Return the common form of the sub-layers, or None if there is none or the layer must be dequantised."""
        forms = [
            self._forms.get(f"{each.name}.weight") if each.tensor_rows is None else None for each in layout.sub_layers
        ]
        known = [form for form in forms if form is not None]
        if not all(form.input_scaled for form in known):
            known = [form._replace(input_scaled=False) for form in known]
        form, columns = common_form(known) if len(known) == len(forms) else None, layout.columns
        if form is None:
            return None
        one_group = form.floating and form.group == columns.full
        if not one_group and (columns.start % form.group or columns.size % form.group):
            return None
        return form if self._in_cpp or fits_triton(form) or form.floating else None


def _groups(columns: ShardRange, form: GroupForm) -> ShardRange:
    """Return the range of quantisation groups of these columns.

    A float8 weight with one group per row is an exception: every rank holds the scale of the whole row.
    """
    if form.floating and form.group == columns.full:
        return whole_range(1)
    return ShardRange(*(each // form.group for each in columns))


def _untyped(layer: nn.Module) -> Any:
    """Return the layer as Any, because nn.Module's type allows only modules and tensors as attributes."""
    return layer
