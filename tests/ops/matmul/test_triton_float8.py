"""Products with weights in float8 in Triton's interpreter, and whole checkpoints that keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paged_forward
import quantized_checkpoints
import tiny_checkpoints
from kernel_comparison import agree, differ
from kernel_mutants import mutant
from ops.matmul.grouped import GroupedWeight, GroupForm, common_form, round_to_float8
from ops.matmul.rounded_rows import RoundedRows
from ops.select import Kernels, select
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo

pytestmark = pytest.mark.interpreter

IDS = [[5, 9, 30]]
# rows, outputs, inputs, inputs per group
SHAPES = {
    "one row": (1, 40, 256, 256),
    "several parts of the inputs": (5, 70, 384, 128),
    "groups of 32": (20, 48, 96, 32),
    "many rows in blocks": (40, 150, 256, 128),
    "many rows by torch": (40, 64, 96, 96),
    "an odd number of inputs": (3, 33, 50, 50),
}


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, GroupedWeight, Tensor]:
    rows, out_size, in_size, group = SHAPES[name]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, in_size, generator=generator) * in_size**-0.5
    codes = torch.randn(out_size, in_size, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = 0.5 + torch.rand(out_size, in_size // group, generator=generator)
    bias = torch.randn(out_size, generator=generator)
    return x.to(dtype), GroupedWeight(codes, scales, bits=8, floating=True), bias.to(dtype)


def expected(name: str, dtype: torch.dtype, *, rounded: bool) -> Tensor:
    """Return the product in float64. torch rounds the rows to e4m3, with one scale per group of inputs."""
    x, weight, bias = inputs(name, dtype)
    wide = round_in_torch(x, weight.group) if rounded else x.double()
    return (wide @ weight.dequantised().double().T + bias.double()).to(dtype)


def round_in_torch(x: Tensor, group: int) -> Tensor:
    groups = x.float().unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return ((groups / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(-2)


def found(backend: Any, name: str, dtype: torch.dtype, *, rounded: bool) -> Tensor:
    x, weight, bias = inputs(name, dtype)
    return backend.product(x, weight.codes.view(torch.float8_e4m3fn), weight.scales, bias, dtype, rounded_rows=rounded)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_those_of_torch(name: str, rounded: bool) -> None:
    from ops.matmul import triton_float8

    dtypes = [torch.float32, torch.float16]
    if rounded:
        dtypes.append(torch.bfloat16)  # the interpreter cannot multiply bfloat16, but float8
    for dtype in dtypes:
        agree([found(triton_float8, name, dtype, rounded=rounded)], [expected(name, dtype, rounded=rounded)], slack=2)


def test_rows_are_rounded_to_nearest_even_as_in_torch() -> None:
    from ops.matmul import triton_float8

    x = torch.randn(5, 300) * torch.exp(4 * torch.randn(5, 300))
    x[3] = 0
    for group in (300, 100):
        numbers, scales = triton_float8.round_rows(x, group)
        groups = x.unflatten(1, (-1, group))
        wanted = (groups.abs().amax(2) / 448).clamp_min(1e-12)
        assert torch.equal(scales, wanted)
        assert torch.equal(numbers.float(), (groups / wanted[..., None]).to(torch.float8_e4m3fn).float().flatten(1))


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    from ops.matmul import triton_float8

    x, weight, _ = inputs("groups of 32", torch.float16)
    codes = weight.codes.view(torch.float8_e4m3fn)
    whole = triton_float8.product(x, codes, weight.scales, None, x.dtype, rounded_rows=True)
    alone = triton_float8.product(x[7:8], codes, weight.scales, None, x.dtype, rounded_rows=True)
    assert torch.equal(whole[7:8], alone)


def test_forms_of_float8_are_not_mixed_with_integers() -> None:
    tensor, block = GroupForm(256, 8, shifted=False, floating=True), GroupForm(128, 8, shifted=False, floating=True)
    assert common_form([tensor, block]) == block
    assert common_form([tensor, GroupForm(256, 8, shifted=False)]) is None
    weight = round_to_float8(torch.randn(3, 256))
    assert torch.equal(weight.as_form(block).dequantised(), weight.dequantised())
    with pytest.raises(ValueError, match="cannot become integers"):
        weight.as_form(GroupForm(256, 8))


def kernels() -> Kernels:
    return select({"matmul": "with_triton", "moe": "with_triton"})


def converting(patch: pytest.MonkeyPatch) -> None:
    """Compute like a GPU without float8 products, whose results differ from the dequantised weight's by rounding."""
    from ops.matmul import triton_float8
    from ops.moe import with_triton

    for module in (triton_float8, with_triton):
        patch.setattr(module, "multiplies_float8", lambda device: False)


CHECKPOINTS = [
    ("fp8", {"scope": "block"}),
    ("fp8", {"scope": "tensor", "static": True}),
    pytest.param("fp8", {"scope": "channel"}, marks=pytest.mark.slow),
    pytest.param("compressed-tensors", {"preset": "FP8_DYNAMIC"}, marks=pytest.mark.slow),
    pytest.param("modelopt", {"kind": "fp8_pb_wo"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("form", "options"), CHECKPOINTS, ids=str)
def test_a_checkpoint_stays_in_float8(
    form: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, form, "qwen3", **options)
    kept: Any = paged_forward.load(quantized, kernels=kernels())
    for layer in kept.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            assert linear.weight.parts.codes.dtype == torch.float8_e4m3fn
    in_blocks = options.get("scope") == "block" or options.get("kind") == "fp8_pb_wo"

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(round_in_torch(x, 32 if in_blocks else x.shape[-1]).float(), weight, bias)

    for reference in (replace(select(), linear=rounding), select()):
        wanted = paged_forward.all_logits(paged_forward.load(plain, kernels=reference), IDS, 16)[0]
        mine = paged_forward.all_logits(kept, IDS, 16)[0]
        # Sums differ by rounding, and then a few activations are rounded to the other side.
        assert float((mine - wanted).square().mean().sqrt()) < 0.03 * float(wanted.std())
        converting(monkeypatch)


@pytest.mark.parametrize(
    "options", [{"scope": "block"}, pytest.param({"scope": "channel"}, marks=pytest.mark.slow)], ids=str
)
def test_experts_stay_in_float8_on_every_rank(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, "fp8", "qwen3_moe", **options)
    x, batch = torch.randn(9, 64), None
    for rank in (RankInfo(rank=0, tp_size=2), RankInfo(rank=1, tp_size=2)):
        axis = Mesh(rank, torch.device("cpu")).axis("tp")
        layers: list[Any] = [
            load_model(read_facts(path), paged_forward.plan_for(path), each, axis).layers[0]
            for path, each in ((quantized, kernels()), (plain, select()))
        ]
        for weight in (layers[0].mlp.gate_up, layers[0].mlp.down, layers[0].attention.out.weight):
            assert weight.parts.codes.dtype == torch.float8_e4m3fn
        for layer in layers:
            layer.mlp._summed_over = None
        assert not layers[0].mlp.takes_adapters
        wanted = layers[1].mlp(x, batch)
        largest = float(wanted.abs().max())
        with monkeypatch.context() as patch:
            for bound in (0.15, 1e-4):  # activations have 4 significant bits, then all
                torch.testing.assert_close(layers[0].mlp(x, batch), wanted, rtol=0, atol=bound * largest)
                converting(patch)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_checkpoint_is_rounded_as_the_command_quantize_rounds_it(family: str, tmp_path: Path) -> None:
    from runtime.loading.quantize import quantize_checkpoint

    shape = quantized_checkpoints.MOE_SHAPE if "moe" in family else quantized_checkpoints.SHAPE
    source, made = tiny_checkpoints.cached(family, **shape), str(tmp_path / "made")
    quantize_checkpoint(source, "fp8", made)
    rounded: Any = paged_forward.load(source, kernels=kernels(), quantization="fp8")
    assert rounded.layers[0].attention.qkv.weight.parts.codes.dtype == torch.float8_e4m3fn
    mine = paged_forward.all_logits(rounded, IDS, 16)
    theirs = paged_forward.all_logits(paged_forward.load(made, kernels=kernels()), IDS, 16)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("one row", "total *= tl.load(scale_lines", "total += 0 * tl.load(scale_lines"),
        ("several parts of the inputs", "tl.load(row_lines + group", "tl.load(row_lines + 0"),
        ("several parts of the inputs", "first = tl.program_id(2) * per_split", "first = 0 * per_split"),
        ("groups of 32", "group = base // GROUP", "group = 0"),
    ],
)
def test_a_broken_kernel_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant("matmul", old, new, tmp_path, file="triton_float8")
    wanted = expected(name, torch.float32, rounded=True)
    assert differ([found(broken, name, torch.float32, rounded=True)], [wanted], slack=2)


@pytest.mark.parametrize("scope", ["block", pytest.param("channel", marks=pytest.mark.slow)])
def test_norms_and_gates_round_the_rows_of_the_products_after_them(scope: str, tmp_path: Path) -> None:
    quantized, _ = quantized_checkpoints.write(tmp_path, "fp8", "qwen3", scope=scope)
    products: list[bool] = []
    whole = select(dict.fromkeys(("matmul", "moe", "norm", "activation"), "with_triton"))

    def linear(x: Tensor, *operands: Any) -> Tensor:
        products.append(isinstance(x, RoundedRows))
        return whole.linear(x, *operands)

    model = paged_forward.load(quantized, kernels=replace(whole, linear=linear))
    found = paged_forward.all_logits(model, IDS, 16)[0]
    wanted = paged_forward.all_logits(paged_forward.load(quantized, kernels=kernels()), IDS, 16)[0]
    agree([found], [wanted], slack=20)  # sums of norms differ in their last bits, and e4m3 rounds them
    # Per layer: queries, keys and values; output of attention; gate and up; down. The first layer's norm adds nothing.
    step = [False, False, True, True, *[True, False, True, True] * (len(model.layers) - 1)]
    assert products
    assert products == step * (len(products) // len(step))
