"""`--torchao-config` gives the same values as torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
)
from transformers import AutoModelForCausalLM

import cpp_kernels
import paged_forward
import tiny_checkpoints
from ops.machine import Machine
from ops.matmul.with_cpp import PackedWeight4
from ops.select import select
from runtime.config import Args
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from runtime.layers.quantization.torchao import int4
from small_facts import FACTS

CONFIGS: dict[str, Any] = {"int8wo": Int8WeightOnlyConfig(), "fp8wo": Float8WeightOnlyConfig()}
IDS = torch.randint(3, 128, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()


def heads_apart(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "proj" in name


@pytest.mark.parametrize("asked", [*CONFIGS, "fp8"])
def test_logits_are_those_of_a_model_that_torchao_rounded(asked: str) -> None:
    path = tiny_checkpoints.cached("qwen3", hidden_size=64, intermediate_size=128, head_dim=16)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    quantize_(theirs, CONFIGS["fp8wo" if asked == "fp8" else asked], filter_fn=heads_apart)
    for module in theirs.modules():  # compare the weights only, because torchao's products need other dtypes
        if isinstance(module, torch.nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = torch.nn.Parameter(module.weight.detach().dequantize())
    ours = paged_forward.load(path, quantization=asked)
    with torch.inference_mode():
        wanted = theirs(torch.tensor(IDS)).logits
    for one, other in zip(paged_forward.all_logits(ours, IDS, 16), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("group", [32, 128])
def test_weights_of_4_bits_are_those_of_tinygemm(group: int) -> None:
    weight, block = torch.randn(24, 256), (1, group)
    scales, zeros = _choose_qparams_affine_tinygemm(
        weight, MappingType.ASYMMETRIC, cast(Any, block), torch.int32, 0, 15, eps=1e-6
    )
    codes = _quantize_affine_tinygemm(weight, list(block), scales, zeros, torch.int32, 0, 15)
    wanted = _dequantize_affine_tinygemm(codes, block, scales, zeros, torch.int32, 0, 15)
    torch.testing.assert_close(int4(weight, group).dequantised(), wanted, rtol=0, atol=1e-6)


def test_they_stay_in_4_bits_where_there_are_kernels() -> None:
    cpp_kernels.library()
    path = tiny_checkpoints.cached("qwen3", hidden_size=64, intermediate_size=128, head_dim=16)
    kept: Any = paged_forward.load(path, kernels=select(cpp_kernels.CHOICES), quantization="int4wo-32")
    assert isinstance(kept.layers[0].mlp.down.weight, PackedWeight4)
    plain = paged_forward.load(path, quantization="int4wo-32")
    mine, theirs = (paged_forward.all_logits(model, IDS, 16) for model in (kept, plain))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * float(other.std()))


def test_dynamic_8_bits_are_our_own() -> None:
    """torchao's scale is the largest magnitude / 127.5, Penstock's is / 127. The values differ by at most one step."""
    layer = torch.nn.Linear(64, 32, bias=False)
    weight = layer.weight.detach().clone()
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    step = weight.abs().amax(1, keepdim=True) / 127
    theirs: Any = layer.weight
    assert ((theirs.dequantize() - (weight / step).round() * step).abs() <= step).all()
    plan = resolve(Args.of(model_path="m", torchao_config="int8dq"), Machine.named("cpu"), FACTS)
    assert plan.model.quantization == "w8a8_int8"


@pytest.mark.parametrize(
    ("asked", "more", "reason"),
    [
        ("fp8dq-per_row", {}, "use --quantization fp8"),
        ("int4wo-48", {}, "is unknown; use int8dq, int8wo"),
        ("int8wo", {"quantization": "w4a16"}, "cannot be combined"),
    ],
)
def test_what_is_not_possible_is_refused(asked: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        resolve(Args.of(model_path="m", torchao_config=asked, **more), Machine.named("cpu"), FACTS)


def test_a_quantised_checkpoint_is_not_rounded_again() -> None:
    facts = replace(FACTS, quantization="awq")
    with pytest.raises(ConfigurationError, match="the checkpoint's awq cannot"):
        resolve(Args.of(model_path="m", torchao_config="int8wo"), Machine.named("cpu"), facts)
