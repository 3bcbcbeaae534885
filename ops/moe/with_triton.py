"""Mixtures of experts in Triton: routing, a sort of the (token, expert) pairs by expert, two grouped products.

A tile of a grouped product has pairs of a single expert. A program finds its expert and tile from the number of sorted
pairs of each expert. Therefore memory needs no padding, and the host reads no sizes: grids depend only on shapes.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.with_triton import gate, gate_round
from ops.matmul.grouped import fits_triton
from ops.matmul.triton_e2m1 import multiply_words
from ops.matmul.triton_float8 import from_float8, inputs_per_step, multiplies_float8, round_rows
from ops.matmul.triton_four_bits import add_step
from ops.matmul.with_triton import (
    FLOATS_OF_4_BITS,
    Packed,
    Parts,
    as_bytes,
    is_of_4_bits,
    prepare_grouped,
    row_group,
    tile_of_words,
    unpacked,
)
from ops.moe import GroupedMixture, Grouping, Mixture, native
from ops.moe.native import prepare_experts
from ops.moe.triton_sort import Sorted, sort_pairs

__all__ = ["mix", "one_expert", "prepare_experts", "prepare_grouped_experts", "route"]

COMBINE_BLOCK = 1024


def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
    """Return packed weights for float8 and supported 4-bit formats, otherwise dequantised weights (see `ops.moe`)."""
    gate_up, down, *biases = mixture
    if not all(weight.floating or fits_triton(weight) for weight in (gate_up, down)):
        return native.prepare_grouped_experts(mixture, dtype)
    return Mixture(prepare_grouped(gate_up, dtype), prepare_grouped(down, dtype), *biases)


def one_expert(mixture: Mixture, expert: int, size: int, inner_size: int) -> Mixture:
    """Return the unpacked weights of one expert, in float32 if they have 4 bits (see `ops.moe`)."""

    def plain(weight: Tensor) -> Tensor:
        if not isinstance(weight, Packed):
            return weight
        if not is_of_4_bits(weight.parts.codes):
            raise ValueError("The weights of experts in float8 are not readable one by one.")
        parts = (None if part is None else part[expert : expert + 1] for part in weight.parts)
        return unpacked(Parts(*parts)).expand(len(weight), -1, -1)

    mixture = mixture._replace(gate_up=plain(mixture.gate_up), down=plain(mixture.down))
    return native.one_expert(mixture, expert, size, inner_size)


def route(
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    grouping: Grouping | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the best experts of each token and their weights (see `ops.moe`). torch computes bias and grouping."""
    if bias is not None or grouping is not None:
        return native.route(
            logits, top_k, renormalise=renormalise, scoring=scoring, bias=bias, grouping=grouping, scale=scale
        )
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        weights,
        experts,
        logits.stride(0),
        scale,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        SCORING=scoring,
        RENORMALISE=renormalise,
        num_warps=1,
    )
    return weights, experts


def mix(
    x: Tensor,
    mixture: Mixture,
    weights: Tensor,
    experts: Tensor,
    activation: str,
    *,
    weigh_inputs: bool = False,
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias = mixture
    (num_tokens, top_k), (num_experts, size, _) = experts.shape, down.shape
    x = x if x.is_contiguous() else x.contiguous()  # without a copy, `RoundedRows` keep their rounding
    by_expert = sort_pairs(experts, num_experts)
    pairs_per_row = top_k
    if weigh_inputs:  # x then has one row per pair instead of one per token
        x = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
        weights, pairs_per_row = torch.ones_like(weights), 1
    inner = _grouped(x, gate_up, gate_up_bias, by_expert, pairs_per_row, from_tokens=True)  # [T * k, 2F], by expert
    group = row_group(down)
    inner = gate(inner, activation) if group is None else gate_round(inner, activation, group)
    results = _grouped(inner, down, down_bias, by_expert, top_k, from_tokens=False)  # [T * k, E], by token
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    block = min(COMBINE_BLOCK, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        results, weights, experts, out, size, TOP_K=top_k, BLOCK=block
    )
    return out


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Sorted, top_k: int, *, from_tokens: bool) -> Tensor:
    """Multiply each pair's row by its expert's weight [X, O, I] and add the bias [X, O]. Return [T * k, O].

    With `from_tokens`, x has one row per token [T, I], and results are in the sorted order of pairs. Otherwise x is in
    the sorted order, and results are in the order of tokens.
    """
    num_pairs, (num_experts, out_size, in_size) = len(pairs.order), weight.shape
    out = torch.empty((num_pairs, out_size), dtype=x.dtype, device=x.device)
    scales = shifts = factors = row_scales = None
    step = group = in_size
    of_4_bits = floating = False
    if isinstance(weight, Packed):
        codes, scales, shifts, factors = weight.parts
        of_4_bits, floating = is_of_4_bits(codes), codes.dtype == FLOATS_OF_4_BITS
        weight, group = codes.view(torch.int32 if floating else torch.uint8), in_size // scales.shape[-1]
        step = group if of_4_bits else inputs_per_step(in_size, in_size // group)
        if not of_4_bits and multiplies_float8(x.device):
            x, row_scales = round_rows(x, group)
    if floating:
        tile = tile_of_words(triton.cdiv(num_pairs, num_experts), "PAIRS_BLOCK", x.dtype)
    else:
        tile = _tile(num_pairs, num_experts, x.dtype, step, of_4_bits=of_4_bits)
    # Upper bound on the number of tiles, since the last tile of each expert may be partial.
    num_tiles = min(num_pairs, num_experts) + num_pairs // tile["PAIRS_BLOCK"]
    _grouped_kernel[(num_tiles, triton.cdiv(out_size, tile["OUT_BLOCK"]))](
        x,
        weight,
        out,
        bias,
        *pairs,
        None if scales is None else as_bytes(scales),
        shifts,
        factors,
        row_scales,
        GROUP=group,
        OF_4_BITS=of_4_bits,
        FLOATING=floating,
        FLOAT8_SCALES=scales is not None and scales.dtype == torch.float8_e4m3fn,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        FROM_TOKENS=from_tokens,
        OUT=out_size,
        IN=in_size,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile,
    )
    return out


def _tile(num_pairs: int, num_experts: int, dtype: torch.dtype, step: int, *, of_4_bits: bool) -> dict[str, Any]:
    """Return the tile sizes. A tile has about the average number of pairs per expert, at most 128.

    An iteration of the main loop reads at most `step` inputs, a power of two or the whole row. If x has 16 bits and the
    weight has 4 bits, an iteration may read several groups of `step` inputs.
    """
    step = triton.next_power_of_2(step)
    if dtype.itemsize == 4:
        return {"PAIRS_BLOCK": 16, "OUT_BLOCK": 64, "IN_BLOCK": min(step, 32), "num_warps": 4, "num_stages": 2}
    pairs = min(128, max(16, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))))
    few = pairs <= 32  # then reading the weights takes most of the time, so loads are wide
    if of_4_bits:
        return {
            "PAIRS_BLOCK": pairs,
            "OUT_BLOCK": 32 if few else 128,
            "IN_BLOCK": 256 if few else 64,
            "num_warps": 4 if few else 8,
            "num_stages": 4 if few else 3,
        }
    return {
        "PAIRS_BLOCK": pairs,
        "OUT_BLOCK": 64 if few else 128,
        "IN_BLOCK": min(step, 128 if few or dtype.itemsize == 1 else 64),
        "num_warps": 8 if pairs == 128 else 4,
        "num_stages": 3,
    }


@triton.jit
def _route_kernel(
    logits,  # [T, EXPERTS]
    weights,  # [T, TOP_K]
    experts,  # [T, TOP_K]
    stride,
    scale,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids, positions = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, TOP_K_BLOCK)
    x = tl.load(logits + token * stride + ids, mask=ids < EXPERTS, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    top_logits = tl.full([TOP_K_BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([TOP_K_BLOCK], tl.int32)
    left = x
    for position in tl.static_range(TOP_K):
        top = tl.max(left, axis=0)
        # If a logit is NaN, possibly no logit equals `top`. Any expert is valid then, and this code takes the last one.
        best = tl.min(tl.where(left == top, ids, EXPERTS - 1), axis=0)
        top_logits, chosen = (
            tl.where(positions == position, top, top_logits),
            tl.where(positions == position, best, chosen),
        )
        left = tl.where(ids == best, float("-inf"), left)
    if SCORING == "softmax":
        scores = tl.exp(top_logits - peak) / tl.sum(tl.exp(x - peak), axis=0)
    else:
        tl.static_assert(SCORING == "sigmoid")
        scores = tl.sigmoid(top_logits)
    if RENORMALISE:
        scores = scores / (tl.sum(scores, axis=0) + 1e-20)
    scores = scores * scale
    inside = positions < TOP_K
    tl.store(weights + token * TOP_K + positions, scores, mask=inside)
    tl.store(experts + token * TOP_K + positions, chosen, mask=inside)


@triton.jit
def _grouped_kernel(
    x,  # [T, IN] or [T * TOP_K, IN]
    # [EXPERTS, OUT, IN], codes of float8 (uint8) if there are scales; [EXPERTS, OUT, IN / 2] if OF_4_BITS;
    # words (int32) [EXPERTS, OUT, IN / 8] if FLOATING
    weight,
    out,  # [T * TOP_K, OUT]
    bias,  # [EXPERTS, OUT], or None
    order,  # [T * TOP_K]
    starts,  # [EXPERTS + 1]
    scales,  # [EXPERTS, OUT, IN / GROUP], see `Parts`; float8 as uint8; or None
    shifts,  # [EXPERTS, OUT, IN / GROUP], or None
    factors,  # [EXPERTS, OUT], or None
    row_scales,  # [T, IN / GROUP] or [T * TOP_K, IN / GROUP], or None if x is not rounded to float8
    GROUP: tl.constexpr,
    OF_4_BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    FLOAT8_SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, ids = tl.program_id(0), tl.arange(0, EXPERTS_BLOCK)
    firsts = tl.load(starts + ids, mask=ids < EXPERTS, other=0)
    ends = tl.load(starts + ids + 1, mask=ids < EXPERTS, other=0)
    num_tiles = (ends - firsts + PAIRS_BLOCK - 1) // PAIRS_BLOCK  # number of tiles of each expert
    up_to = tl.cumsum(num_tiles, axis=0)
    expert = tl.sum(((up_to <= tile) & (ids < EXPERTS)).to(tl.int32), axis=0)
    if expert >= EXPERTS:
        return
    first_tile = tl.sum(tl.where(ids == expert, up_to - num_tiles, 0), axis=0)
    positions = tl.load(starts + expert) + (tile - first_tile) * PAIRS_BLOCK + tl.arange(0, PAIRS_BLOCK)
    is_pair = positions < tl.load(starts + expert + 1)
    sources = tl.load(order + positions, mask=is_pair, other=0) // TOP_K if FROM_TOKENS else positions

    columns, inner = tl.program_id(1) * OUT_BLOCK + tl.arange(0, OUT_BLOCK), tl.arange(0, IN_BLOCK)
    rows = x + sources.to(tl.int64)[:, None] * IN + inner[None, :]  # [PAIRS, IN]
    lines = expert.to(tl.int64) * OUT + columns
    is_column = columns < OUT
    total = tl.zeros([PAIRS_BLOCK, OUT_BLOCK], tl.float32)
    scale_lines = scales + lines * (IN // GROUP) if scales is not None else None
    shift_lines = shifts + lines * (IN // GROUP) if shifts is not None else None
    row_lines = row_scales + sources.to(tl.int64) * (IN // GROUP) if row_scales is not None else None
    if FLOATING:
        words_of = weight + lines * (IN // 8)
        total = multiply_words(
            rows, is_pair, words_of, scale_lines, is_column, 0, IN, IN, GROUP, FLOAT8_SCALES, PRECISION
        )
        total *= tl.load(factors + lines, mask=is_column, other=0.0)[None, :]
    elif OF_4_BITS:
        pairs_of_codes = tl.arange(0, IN_BLOCK // 2)
        bytes_of = weight + lines[:, None] * (IN // 2) + pairs_of_codes[None, :]
        for base in range(0, IN, IN_BLOCK):
            a = tl.load(rows + base, mask=is_pair[:, None] & (base + inner < IN)[None, :], other=0.0)
            is_byte = is_column[:, None] & (base // 2 + pairs_of_codes < IN // 2)[None, :]
            b = tl.load(bytes_of + base // 2, mask=is_byte, other=0)
            total = add_step(total, a, b, scale_lines, shift_lines, is_column, base, IN, GROUP, PRECISION)
    else:
        weight_rows = weight + lines[:, None] * IN + inner[None, :]  # [OUT, IN]
        for base in range(0, IN, IN_BLOCK):
            is_in = (base + inner < IN)[None, :]
            a = tl.load(rows + base, mask=is_pair[:, None] & is_in, other=0.0)
            b = tl.load(weight_rows + base, mask=is_column[:, None] & is_in, other=0)
            if row_scales is not None:
                b = b.to(tl.float8e4nv, bitcast=True)
            elif scales is not None:
                b = from_float8(b, a)
            if GROUP == IN:
                total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
            else:
                part = tl.dot(a, tl.trans(b), input_precision=PRECISION)
                part *= tl.load(scale_lines + base // GROUP, mask=is_column, other=0.0)[None, :]
                if row_scales is not None:
                    part *= tl.load(row_lines + base // GROUP, mask=is_pair, other=0.0)[:, None]
                total += part
        if scales is not None and GROUP == IN:
            total *= tl.load(scale_lines, mask=is_column, other=0.0)[None, :]
            if row_scales is not None:
                total *= tl.load(row_lines, mask=is_pair, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + lines, mask=is_column, other=0.0).to(tl.float32)[None, :]
    # Loading before the loop would occupy registers during all its iterations.
    targets = positions if FROM_TOKENS else tl.load(order + positions, mask=is_pair, other=0)
    position = targets.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _combine_kernel(
    results,  # [T * TOP_K, size]
    weights,  # [T, TOP_K]
    experts,  # [T, TOP_K], -1: computed by another rank
    out,  # [T, size]
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for position in tl.static_range(TOP_K):
        pair = token * TOP_K + position
        end = tl.where(tl.load(experts + pair) >= 0, size, 0)  # nothing is added for pairs of other ranks
        result = tl.load(results + pair * size + columns, mask=columns < end, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * result
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=columns < size)
