"""Graphs of models with latent attention, recurrent layers and experts, on a late device."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import late_steps
import recorded_flashinfer
import tiny_checkpoints
from fake_device import LateDevice
from kernel_cases.moe import fused_experts
from ops.matmul import nvfp4
from ops.matmul.block_scaled import has_blocks
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.grouped import E2M1, GroupedWeight
from ops.matmul.rounded_rows import round_rows
from ops.matmul.with_triton import Packed
from ops.recurrence import Segments, Span, independent
from runtime.layers import recurrent
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.linear import Linear
from runtime.layers.moe import mixtures
from runtime.layers.weight import frozen
from runtime.loading.loader import load_model
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.worker.cuda_graph import CudaGraphRunner

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * (i * 7 % 5)) for i in range(6)]
FEW = PROMPTS[:4]
SHARED = [([7, 5, 3, 9, 2, 8, 4, 6, 1][:length], 6) for length in (8, 9, 9, 5, 8)]  # rows continue from snapshots


def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of every replay."""
    sizes: list[int] = []
    fill = CudaGraphRunner._fill

    def counted(self: CudaGraphRunner, batch: Any, arrays: Any) -> None:
        sizes.append(batch.num_tokens)
        fill(self, batch, arrays)

    monkeypatch.setattr(CudaGraphRunner, "_fill", counted)
    return sizes


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",  # gated delta nets and experts
        "deepseek_v2",  # latent attention and experts
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),  # Mamba 2
        pytest.param("lfm2", marks=pytest.mark.slow),  # short convolutions
    ],
)
@pytest.mark.parametrize("prompts", [PROMPTS, SHARED], ids=["own", "shared"])
def test_graphs_give_the_tokens_of_eager_steps(
    family: str, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = late_steps.outputs(prompts, family=family)
    sizes = replays(monkeypatch)
    for seed, depth in ((0, 1), (1, 2)):
        found = late_steps.outputs(
            prompts, family=family, device=LateDevice(Random(seed)), depth=depth, sizes=(1, 2, 4), capture_every=1
        )
        assert found == expected
    assert len(set(sizes)) > 1  # several sizes, with and without padding rows


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace FlashInfer by fakes with its signatures, and Triton's rounding of rows by torch's."""
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def rounded(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = round_rows(x, group)
        return rows.numbers, rows.scales

    for name in ("ops.matmul.with_groupwise", "ops.moe.with_trtllm_gen"):
        monkeypatch.setattr(f"{name}.round_rows", rounded)


@pytest.mark.parametrize("form", ["MXFP4", "NVFP4", "float8 blocks"])
@pytest.mark.parametrize("file", ["with_flashinfer", "with_trtllm_gen"])
def test_fused_experts_are_captured(file: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernels for quantised experts, as fakes, give the tokens of eager steps."""
    use_fakes(monkeypatch)
    backend: Any = import_module(f"ops.moe.{file}")
    mixture, calls = fused_experts(form), []

    def mix(x: torch.Tensor, *operands: Any, **more: Any) -> torch.Tensor:
        calls.append(len(x))
        return backend.mix(x.to(torch.bfloat16), *operands, **more).to(x.dtype)

    _, size, inner_size = mixture.down.codes.shape
    shape = {"hidden_size": size, "moe_intermediate_size": inner_size, "num_experts": 4, "num_experts_per_tok": 2}
    facts = late_steps.facts("qwen3_moe", **shape)
    model = load_model(facts, late_steps.model_plan(), replace(late_steps.kernels(), mix=mix))
    for layer in mixtures(model).values():
        prepared = backend.prepare_grouped_experts(mixture, torch.bfloat16)
        layer.activation = "clamped_swiglu" if form == "MXFP4" else "silu"
        layer.gate_up, layer.down = frozen(prepared.gate_up), frozen(prepared.down)
        layer.gate_up_bias, layer.down_bias = (None if bias is None else frozen(bias) for bias in prepared[2:])
    monkeypatch.setattr(late_steps, "model", lambda family: model)
    expected = late_steps.outputs(FEW, family="qwen3_moe")
    sizes, eager = replays(monkeypatch), len(calls)
    device = LateDevice(Random(0))
    assert late_steps.outputs(FEW, family="qwen3_moe", device=device, sizes=(2, 4), capture_every=1) == expected
    assert sizes
    assert len(calls) < 2 * eager  # replays do not call the library


def in_blocks(weight: torch.Tensor) -> GroupedWeight:
    """Return a weight in float8 with one scale per block of 128 x 128 numbers."""
    blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # [O / 128, 128, I / 128, 128]
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return GroupedWeight(codes.view(weight.shape), scales.repeat_interleave(128, 0), bits=8, floating=True)


def in_nvfp4(weight: torch.Tensor) -> GroupedWeight:
    rounded = nvfp4.round_rows(weight, 1e-3)
    codes = torch.stack((rounded.codes & 15, rounded.codes >> 4), -1).flatten(-2)
    return GroupedWeight(codes, rounded.scales.float() * 1e-3, table=E2M1, input_scales=torch.tensor([2e-3]))


@pytest.mark.parametrize(
    ("file", "quantise"), [("with_deepgemm", in_blocks), ("with_groupwise", in_blocks), ("with_fp4", in_nvfp4)]
)
def test_flashinfers_products_are_captured(file: str, quantise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's products with quantised weights, as fakes, give the tokens of eager steps."""
    use_fakes(monkeypatch)
    backend: Any = import_module(f"ops.matmul.{file}")
    given, calls = late_steps.kernels(), []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, FusedWeight | Packed):
            return given.linear(x, weight, bias)
        calls.append(len(x))
        return backend.linear(x.to(torch.bfloat16), weight, bias).to(x.dtype)

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    facts = late_steps.facts("qwen3", **shape, head_dim=64)
    model = load_model(facts, late_steps.model_plan(), replace(given, linear=linear))
    linears = [module for layer in model.layers for module in layer.modules() if isinstance(module, Linear)]
    for layer in linears:
        layer.weight = frozen(backend.prepare_grouped(quantise(layer.weight), torch.bfloat16))
        assert isinstance(layer.weight, FusedWeight) or has_blocks(layer.weight)
    monkeypatch.setattr(late_steps, "model", lambda family: model)
    expected = late_steps.outputs(FEW, family="qwen3")
    sizes, eager = replays(monkeypatch), len(calls)
    assert (
        late_steps.outputs(FEW, family="qwen3", device=LateDevice(Random(0)), sizes=(2, 4), capture_every=1) == expected
    )
    assert sizes
    assert 0 < len(calls) - eager < eager  # replays do not call the library


def test_graphs_combine_experts_without_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange needs the sizes of messages on the host, so neither a capture nor the run before it exchanges."""
    experts = ExpertSharing(Mesh(RankInfo(), torch.device("cpu")).axis("ep"))
    model = load_model(
        late_steps.facts("qwen3_moe"), late_steps.model_plan("qwen3_moe"), late_steps.kernels(), experts=experts
    )
    monkeypatch.setattr(late_steps, "model", lambda family: model)
    counts: list[int] = []

    def combine(self: ExpertSharing, layer: int, chosen: torch.Tensor, num_experts: int, mix: Any) -> torch.Tensor:
        assert not any(frame.function in ("capture_next", "capture_parts") for frame in inspect.stack())
        counts.append(len(chosen))
        return mix(torch.arange(len(chosen)))

    monkeypatch.setattr(ExpertSharing, "exchanges", lambda self, x: True)
    monkeypatch.setattr(ExpertSharing, "combine", combine)
    expected = late_steps.outputs(FEW, family="qwen3_moe")
    eager, sizes = len(counts), replays(monkeypatch)
    found = late_steps.outputs(
        FEW,
        family="qwen3_moe",
        device=LateDevice(Random(0)),
        sizes=(2, 4),
        prompt_sizes=(8,),
        capture_every=1,
    )
    assert found == expected
    assert sizes
    assert eager
    assert 0 < len(counts) - eager < eager  # replays do not exchange


def test_spans_that_a_graph_keeps_from_the_capture_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = late_steps.outputs(PROMPTS, family="qwen3_next")
    monkeypatch.setattr("runtime.worker.cuda_graph._spans", lambda buffers: [])
    found = late_steps.outputs(
        PROMPTS, family="qwen3_next", device=LateDevice(Random(0)), sizes=(1, 2, 4), capture_every=1
    )
    assert found != expected


def test_spans_on_the_host_are_not_copied_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Segments] = []
    build = recurrent.Segments

    def recorded(*args: Any, **more: Any) -> Segments:
        made.append(build(*args, **more))
        return made[-1]

    monkeypatch.setattr(recurrent, "Segments", recorded)
    late_steps.outputs(PROMPTS[:2], family="qwen3_next", device=LateDevice(Random(0)))
    assert made
    assert all(each.host is not None for each in made)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 1, 0, 1), (2, 3, 1, 1), (2, 4, 2, 1)], True),
        ([(0, 1, 0, 1), (2, 3, 1, 2)], False),  # two tokens
        ([(0, 1, 0, 1), (1, 3, 1, 1)], False),  # the second row continues from the first row's state
        ([(3, 1, 0, 1), (2, 3, 1, 1)], False),
        ([(0, 1, 0, 1), (2, 1, 1, 1)], False),  # both write one slot
    ],
)
def test_only_independent_rows_are_one_wave(spans: list[tuple[int, ...]], expected: bool) -> None:
    array = np.array(spans, np.int32)
    assert independent(array) == expected
    if expected:
        [wave] = Segments(torch.from_numpy(array), captured=True).waves
        [same] = Segments.build([Span(*each) for each in spans]).waves
        for one, other in zip(wave[:3], same[:3], strict=True):
            assert torch.equal(one, other)
        assert wave.spans == same.spans == ()


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_checkpoints.FAMILIES)
def test_no_family_waits_for_the_device_in_a_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late device raises an error if a capture needs values on the host."""
    sizes = replays(monkeypatch)
    expected = late_steps.outputs(PROMPTS[:3], family=family)
    found = late_steps.outputs(
        PROMPTS[:3],
        family=family,
        device=LateDevice(Random(0)),
        sizes=(1, 2, 4),
        prompt_sizes=(8, 16),
        capture_every=1,
    )
    assert found == expected
    assert sizes


@pytest.mark.parametrize("topk", [1, 3], ids=["chains", "trees"])
def test_drafts_over_windowed_pages_are_captured(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, ways = [(prompt, 20) for prompt, _ in PROMPTS[:4]], ({"temperature": 0.0},)
    expected = late_steps.outputs(prompts, family="gemma3", num_pages=64, ways=ways)
    replayed, fill = list[bool](), CudaGraphRunner._fill_repeated

    def counted(self: CudaGraphRunner, repeated: Any) -> None:
        replayed.append(repeated[0] is not None)
        fill(self, repeated)

    monkeypatch.setattr(CudaGraphRunner, "_fill_repeated", counted)
    sizes = replays(monkeypatch)
    found = late_steps.outputs(
        prompts,
        family="gemma3",
        num_pages=64,
        num_windowed=48,
        device=LateDevice(Random(1)),
        sizes=(8, 24),
        capture_every=1,
        drafts=expected,
        topk=topk,
        ways=ways,
    )
    assert found == expected
    assert max(sizes) > len(prompts)  # steps with drafts
    assert any(replayed) == (topk > 1)
