"""Time mixtures of experts and recurrent layers of published models' shapes, for decode rows and long prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch

from bench.contact.timing import Call, Place, Row, measure
from bench.gpu.limits import Work
from on_device.operations import fused_expert_files
from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm, round_to_float8
from ops.moe import GroupedMixture, Mixture
from ops.recurrence import Segments, Span

BLOCKS = GroupForm(128, 8, shifted=False, floating=True)


class Experts(NamedTuple):
    """The shape of a mixture of experts."""

    name: str
    num_experts: int
    top_k: int
    size: int
    inner_size: int


MIXTURE = Experts("Qwen3-30B-A3B", 128, 8, 2048, 768)
SMALL_MIXTURE = Experts("tiny", 4, 2, 128, 128)
FORMATS = {
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "float8 blocks": "float8 in blocks",
}  # a FlashInfer backend's format -> key of `EXPERT_BITS`
# Bits per weight, with its scales.
EXPERT_BITS = {"bfloat16": 16.0, "float8": 8.0, "float8 in blocks": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


def experts(place: Place) -> Iterator[Row]:
    """Yield a row for the routing of each number of tokens, and one for each weight format and number of tokens.

    On a GPU, FlashInfer's kernels for quantised experts are measured too if they are installed as machine code.
    """
    shape, counts = (SMALL_MIXTURE, (1, 3)) if place.small else (MIXTURE, (1, 64, 8192))
    for count in counts:
        yield partial(
            measure,
            place,
            f"select experts, {count} tokens",
            shape.name,
            Work(2.0 * count * shape.num_experts),
            partial(_route, place, shape, count),
            in_graph=True,
        )
    for name in EXPERT_BITS:
        for count in counts:
            yield partial(
                measure,
                place,
                f"experts in {name}, {count} tokens",
                shape.name,
                _mixing(shape, name, count),
                partial(_mix, place, shape, name, count),
                in_graph=True,
            )

    for file, form in fused_expert_files() if place.on_gpu else ():
        for count in counts:
            yield partial(
                measure,
                place,
                f"experts in {FORMATS[form]} by FlashInfer, {count} tokens",
                shape.name,
                _mixing(shape, FORMATS[form], count),
                partial(_mix, place, shape, FORMATS[form], count, file),
                in_graph=True,
            )


def _mixing(shape: Experts, name: str, count: int) -> Work:
    """Return the cost: each selected expert is read once. Assumes that tokens select experts uniformly at random."""
    pairs, weights = count * shape.top_k, 3 * shape.size * shape.inner_size
    selected = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** count)
    return Work(selected * weights * EXPERT_BITS[name] / 8 + 4 * count * shape.size, 2 * pairs * weights)


def _route(place: Place, shape: Experts, count: int) -> Call:
    route, logits = import_module(f"ops.moe.{place.kernels}").route, place.draw(count, shape.num_experts)
    return lambda: route(logits, shape.top_k, renormalise=True)


def _mix(place: Place, shape: Experts, name: str, count: int, file: str | None = None) -> Call:
    moe = import_module(f"ops.moe.{file or place.kernels}")
    weights, chosen = moe.route(place.draw(count, shape.num_experts), shape.top_k, renormalise=True)
    if name in ("mxfp4", "nvfp4"):
        gate_up = _of_4_bits(place, shape, name, 2 * shape.inner_size, shape.size)
        grouped = GroupedMixture(gate_up, _of_4_bits(place, shape, name, shape.size, shape.inner_size))
        mixture, x = moe.prepare_grouped_experts(grouped, torch.bfloat16), place.draw(count, shape.size)
        return lambda: moe.mix(x, mixture, weights, chosen, "silu")
    gate_up = place.draw(shape.num_experts, 2 * shape.inner_size, shape.size, scale=shape.size**-0.5)
    down = place.draw(shape.num_experts, shape.size, shape.inner_size, scale=shape.inner_size**-0.5)
    if name == "bfloat16":
        mixture = moe.prepare_experts(Mixture(gate_up, down))
    else:
        rounded = round_to_float8(gate_up), round_to_float8(down)
        if name == "float8 in blocks":
            rounded = rounded[0].as_form(BLOCKS), rounded[1].as_form(BLOCKS)
        mixture = moe.prepare_grouped_experts(GroupedMixture(*rounded), torch.bfloat16)
    x = place.draw(count, shape.size)
    return lambda: moe.mix(x, mixture, weights, chosen, "silu")


def _of_4_bits(place: Place, shape: Experts, name: str, out_size: int, in_size: int) -> GroupedWeight:
    """Return experts' weights with random codes, and with scales that make the products about as large as x."""
    codes = place.draw(shape.num_experts, out_size, in_size).mul_(5).to(torch.int32).bitwise_and_(15).to(torch.uint8)
    scale = 2.0 ** round(-1.5 - math.log2(in_size) / 2)
    scales = torch.full((shape.num_experts, out_size, in_size // (32 if name == "mxfp4" else 16)), scale)
    scales = scales.to(codes.device)
    if name == "mxfp4":
        return GroupedWeight(codes, scales, table=E2M1, powers=True)
    inputs = torch.full((shape.num_experts, 1), 1 / 448, device=codes.device)
    return GroupedWeight(codes, scales, table=E2M1, input_scales=inputs)


class Recurrent(NamedTuple):
    """The shape of a recurrent layer: a gated delta net, or a selective scan, with the convolution before it."""

    name: str
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim

    @property
    def state(self) -> int:
        """Number of float32 values of a state."""
        return self.heads * self.key_dim * self.value_dim


DELTA, SCAN = Recurrent("Qwen3-Next-80B-A3B", 16, 32, 128, 128), Recurrent("Granite-4.0-H-Small", 1, 128, 128, 64)
SMALL_DELTA, SMALL_SCAN = Recurrent("tiny", 2, 4, 16, 32), Recurrent("tiny", 1, 4, 16, 32)


def recurrence(place: Place) -> Iterator[Row]:
    """Yield rows for each operation: decode steps of several sequences, and one prompt."""
    delta, scan = (SMALL_DELTA, SMALL_SCAN) if place.small else (DELTA, SCAN)
    counts, prompt = ((1, 3), 40) if place.small else ((1, 64), 8192)
    operations = {"convolve": delta, "delta_rule": delta, "scan": scan}
    for operation, shape in operations.items():
        for rows, tokens in (*((count, 1) for count in counts), (1, prompt)):
            label = f"a prompt of {tokens:,}" if tokens > 1 else f"{rows} rows"
            yield partial(
                measure,
                place,
                f"{operation}, {label}",
                shape.name,
                _recurring(operation, shape, rows, rows * tokens),
                partial(_recur, place, operation, shape, rows, tokens),
                in_graph=tokens == 1,
            )


def _recurring(operation: str, shape: Recurrent, rows: int, tokens: int) -> Work:
    """Return the cost: states are read and written once per sequence, and inputs and outputs once per token."""
    if operation == "convolve":
        return Work(rows * 4 * (shape.taps - 1) * shape.channels + 4 * tokens * shape.channels)
    vectors = 2 * tokens * (shape.channels + shape.heads * shape.value_dim)
    products = 3 if operation == "delta_rule" else 2  # of a vector with the state, or for its update
    return Work(rows * 2 * 4 * shape.state + vectors, 2 * products * tokens * shape.state)


def _recur(place: Place, operation: str, shape: Recurrent, rows: int, tokens: int) -> Call:
    backend, total = import_module(f"ops.recurrence.{place.kernels}"), rows * tokens
    spans = [Span(row + 1, row + 1, row * tokens, tokens) for row in range(rows)]
    segments = Segments.build(spans, place.device)
    if tokens == 1:  # decode steps are replayed, and their spans are unknown on the host
        segments = Segments(segments.spans, captured=True)
    slots = rows + 2  # slot 0 holds zeros, and nothing reads the last slot
    if operation == "convolve":
        pool = place.draw(slots, shape.taps - 1, shape.channels)
        x, weight = place.draw(total, shape.channels), place.draw(shape.taps, shape.channels)
        return lambda: backend.convolve(x, weight, None, pool, segments)
    k, v = place.draw(total, shape.groups, shape.key_dim), place.draw(total, shape.heads, shape.value_dim)
    q, gates = place.draw(total, shape.groups, shape.key_dim, scale=0.5), place.draw(total, shape.heads)
    rate, shift = (place.draw(shape.heads, dtype=torch.float32) for _ in range(2))
    pool = place.draw(slots, shape.heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    pool[0] = 0
    if operation == "delta_rule":
        return lambda: backend.delta_rule(q, k, v, gates, gates, rate, shift, pool, segments)
    return lambda: backend.scan(v, gates, k, q, rate, shift, rate, pool, segments, low=0.001, high=0.1)
