"""Mixtures of experts in C++ (`ops/cpp/source/experts.h`): routing, sorting by expert, two products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation.with_cpp import KINDS
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, contiguous_tokens
from ops.cpp.structures import Combine, Dispatch, Experts, PairTable, Product, Product8, Route
from ops.embedding import with_cpp as embedding
from ops.matmul import with_cpp as matmul
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_cpp import PACKED, PackedWeight, PackedWeight4, PackedWeight8, product4, scratch8
from ops.moe import GroupedMixture, Grouping, Mixture, native

MAX_EXPERTS = 1024
SCORINGS = {"softmax": 0, "sigmoid": 1}
DEPTH = 32  # the experts' inner size is padded to a multiple of this, so that AMX computes whole tiles


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.moe`."""
    operations = (route, mix, prepare_experts, prepare_grouped_experts, one_expert)
    return {operation.__name__: partial(operation, launcher) for operation in operations}


def route(
    launcher: KernelLauncher,
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    grouping: Grouping | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the best experts of each token and their weights."""
    num_experts = logits.shape[1]
    if num_experts > MAX_EXPERTS or logits.dtype not in TYPES:
        return native.route(
            logits,
            top_k,
            renormalise=renormalise,
            scoring=scoring,
            bias=bias,
            grouping=grouping,
            scale=scale,
        )
    logits = contiguous_tokens(logits)
    weights = launcher.empty((len(logits), top_k), torch.float32)
    experts = launcher.empty((len(logits), top_k), torch.int32)
    groups, top_groups, num_scores = grouping or (1, 1, 1)
    operands = Route(
        logits=address(logits),
        stride=logits.stride(0),
        bias=address(bias),
        weights=address(weights),
        experts=address(experts),
        tokens=launcher.tokens(logits),
        num_experts=num_experts,
        top_k=top_k,
        scoring=SCORINGS[scoring],
        renormalise=renormalise,
        num_groups=groups,
        top_groups=top_groups,
        group_scores=num_scores,
        scale=scale,
    )
    launcher.launch("route", logits.dtype, operands)
    return weights, experts


def prepare_experts(launcher: KernelLauncher, mixture: Mixture, *, bits: int | None = None) -> Mixture:
    """Return the packed weights of all experts, or `mixture` itself if the kernels do not support its weights.

    In `gate_up`, one half of the rows of each panel comes from the gate, and the other half from `up`.
    """
    gate_up, down, gate_up_bias, down_bias = mixture
    (num_experts, twice, size), dtype = gate_up.shape, gate_up.dtype
    if gate_up.device.type != "cpu" or dtype not in TYPES or num_experts > MAX_EXPERTS:
        return mixture
    if size * dtype.itemsize % 4 or (bits == 8 and max(size, twice) > launcher.library.max_byte_depth):
        return mixture
    width, pack = launcher.library.panel_width, partial(matmul.prepare, launcher)
    padding = -(twice // 2) % DEPTH  # number of zeros that pad the intermediate size to a multiple of DEPTH
    inner = twice // 2 + padding
    gate_up = _interleave(gate_up.detach(), padding, width // 2).reshape(-1, size)
    down = F.pad(down.detach(), (0, padding, 0, -size % width))
    return Mixture(
        _as_experts(pack(gate_up, bits=bits), num_experts, 2 * inner),
        _as_experts(pack(down.reshape(-1, inner), bits=bits), num_experts, down.shape[1]),
        _interleave_bias(gate_up_bias, padding, width // 2),
        down_bias,
    )


def prepare_grouped_experts(launcher: KernelLauncher, mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return packed 4-bit weights in the row order of `prepare_experts`.

    Weights that the kernels do not support are dequantised and then prepared by `prepare_experts`.
    """
    gate_up, down, gate_up_bias, down_bias = mixture
    num_experts, twice, size = gate_up.codes.shape
    width, padding = launcher.library.panel_width, -(twice // 2) % DEPTH
    supported = dtype in TYPES and num_experts <= MAX_EXPERTS and not gate_up.floating
    if not supported or gate_up.group % 8 or down.group % 8 or padding % down.group:
        return prepare_experts(launcher, native.prepare_grouped_experts(mixture, dtype))

    def interleave(part: Tensor) -> Tensor:
        return _interleave(part, padding, width // 2).flatten(0, 1)

    def padded(part: Tensor) -> Tensor:
        columns = padding * part.shape[2] // (twice // 2)
        return F.pad(part, (0, columns, 0, -size % width)).flatten(0, 1)

    pack = partial(matmul.prepare_grouped, launcher, dtype=dtype)
    return Mixture(
        _as_experts(pack(_each(gate_up, interleave)), num_experts, twice + 2 * padding),
        _as_experts(pack(_each(down, padded)), num_experts, size + -size % width),
        _interleave_bias(gate_up_bias, padding, width // 2),
        down_bias,
    )


def one_expert(launcher: KernelLauncher, mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the unpacked weights of one expert, in the dtype of products. Raises ValueError for weights in int8."""
    gate_up, down, gate_up_bias, down_bias = mixture
    if not isinstance(gate_up, PACKED):
        return native.one_expert(mixture, expert, size, inner_size)
    if not all(isinstance(each, PackedWeight | PackedWeight4) for each in (gate_up, down)):
        raise ValueError("Experts in int8 cannot be read.")
    half = launcher.library.panel_width // 2

    def rows(packed: Tensor) -> Tensor:
        num_experts, count, depth = packed.shape
        strides = (0, 0) if isinstance(packed, PackedWeight4) else (depth, 1)
        flat = packed.as_strided((num_experts * count, depth), strides, packed.storage_offset())
        ids = torch.arange(expert * count, (expert + 1) * count)
        return embedding.make(launcher)["embed"](ids, flat.as_subclass(type(packed)))

    def separate(interleaved: Tensor) -> Tensor:  # the reverse of `_interleave`
        parts = interleaved.unflatten(0, (-1, 2, half)).transpose(0, 1).flatten(1, 2)
        return parts[:, :inner_size].flatten(0, 1).unsqueeze(0)

    return Mixture(
        separate(rows(gate_up)),
        rows(down)[:size, :inner_size].unsqueeze(0),
        None if gate_up_bias is None else separate(gate_up_bias[expert]),
        None if down_bias is None else down_bias[expert : expert + 1],
    )


def _each(weight: GroupedWeight, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
    shifts = None if weight.shifts is None else change(weight.shifts)
    return weight._replace(codes=change(weight.codes), scales=change(weight.scales), shifts=shifts)


def _interleave(rows: Tensor, padding: int, half: int) -> Tensor:
    """Pad rows [X, 2F, n] to [X, 2 (F + padding), n], and let `half` rows of the gate alternate with `half` of `up`."""
    rows = F.pad(rows.unflatten(1, (2, -1)), (0, 0, 0, padding))
    return rows.unflatten(2, (-1, half)).transpose(1, 2).flatten(1, 3)


def _interleave_bias(bias: Tensor | None, padding: int, half: int) -> Tensor | None:
    return None if bias is None else _interleave(bias.detach().unsqueeze(2), padding, half).squeeze(2)


def mix(
    launcher: KernelLauncher,
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    *,
    weigh_inputs: bool = False,
) -> Tensor:
    """Return the weighted sum of each token's experts."""
    gate_up, down, gate_up_bias, down_bias = mixture
    if not isinstance(gate_up, PACKED):
        return native.mix(x, mixture, weights, experts, activation, weigh_inputs=weigh_inputs)
    x = contiguous_tokens(x)
    (num_tokens, size), top_k, tokens = x.shape, experts.shape[1], launcher.tokens(x)
    (num_experts, twice, _), inner = gate_up.shape, gate_up.shape[1] // 2
    pairs, width = num_tokens * top_k, launcher.library.panel_width
    lengths = {"positions": pairs, "starts": num_experts + 1, "blocks": num_experts + 1}
    tables = {name: launcher.empty((length,), torch.int32) for name, length in lengths.items()}
    table = PairTable(**{name: address(tensor) for name, tensor in tables.items()})
    rows = launcher.empty((pairs, size), x.dtype)
    operands = Dispatch(
        x=address(x),
        x_stride=x.stride(0),
        experts=address(experts),
        weights=address(weights) if weigh_inputs else None,
        table=table,
        rows=address(rows),
        tokens=tokens,
        num_experts=num_experts,
        top_k=top_k,
        size=size,
    )
    launcher.launch("dispatch", x.dtype, operands)
    common = {"table": table, "num_experts": num_experts, "kind": KINDS[activation]}
    hidden = launcher.empty((pairs, inner), x.dtype)
    _multiply(
        launcher,
        "experts_up",
        rows,
        gate_up,
        hidden,
        bias=address(gate_up_bias),
        panels=twice // width,
        **common,
    )
    results = launcher.empty((pairs, size), x.dtype)
    panels = down.shape[1] // width
    _multiply(launcher, "experts_down", hidden, down, results, bias=address(down_bias), panels=panels, **common)
    out = launcher.empty((num_tokens, size), x.dtype)
    launcher.launch(
        "combine",
        x.dtype,
        Combine(
            results=address(results),
            positions=table.positions,
            weights=None if weigh_inputs else address(weights),
            out=address(out),
            tokens=tokens,
            top_k=top_k,
            size=size,
        ),
    )
    return out


def _multiply(launcher: KernelLauncher, kernel: str, x: Tensor, weight: Tensor, out: Tensor, **operands: Any) -> None:
    plain = Product(x=address(x), x_stride=x.shape[1], weight=address(weight), in_size=x.shape[1])
    product = Product8(plain=plain)
    if isinstance(weight, PackedWeight8):
        kernel += "8"
        rounded = scratch8(launcher, len(x), x.shape[1])
        product = Product8(plain=plain, scales=weight.scales_address, rounded=address(rounded))
    expert_operands = Experts(product=product, out=address(out), out_size=out.shape[1], **operands)
    if isinstance(weight, PackedWeight4):
        kernel += "4"
        expert_operands.product4, _kept = product4(launcher, plain, weight, len(x), x.dtype)
    launcher.launch(kernel, x.dtype, expert_operands)


def _as_experts(packed: Tensor, num_experts: int, rows: int) -> Tensor:
    """Return a view of packed memory as the weights of experts, [X, rows, I]."""
    size = packed.shape[1]
    shape, strides = (num_experts, rows, size), (rows * size, size, 1)
    if isinstance(packed, PackedWeight4):  # views of this class have strides of 0
        strides = (0, 0, 0)
    return packed.as_strided(shape, strides, packed.storage_offset()).as_subclass(type(packed))
