"""Complete checkpoints written by the libraries themselves: logits on one rank and on two."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
)
from torchao.quantization.granularity import PerGroup, PerTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    TorchAoConfig,
)

import paged_forward
import quantized_checkpoints
import ranks_in_threads
import tiny_checkpoints

IDS = torch.randint(3, 128, (2, 30), generator=torch.Generator().manual_seed(1)).tolist()
INT4: Any = torch.int4  # pyright: ignore[reportAttributeAccessIssue]
SHAPES = {
    "llama": quantized_checkpoints.SHAPE,
    "qwen3_moe": quantized_checkpoints.MOE_SHAPE,
    "gpt_oss": {**quantized_checkpoints.SHAPE, "intermediate_size": 64},
}
# (checkpoint, folder) -> how transformers reads the written checkpoint, or its logits
Write = Callable[[str, Path], Any]


def saved(**settings: Any) -> Write:
    """Save with transformers and settings of bitsandbytes."""

    def write(source: str, target: Path) -> Any:
        load(source, BitsAndBytesConfig(**settings)).save_pretrained(target)

    return write


def torchao(config: Any, **more: Any) -> Write:
    def write(source: str, target: Path) -> Any:
        load(source, TorchAoConfig(config, **more)).save_pretrained(target)

    return write


def compressed(*groups: dict[str, Any], **more: Any) -> Write:
    """Compress with the calls of compressed-tensors and the ranges of the weights."""

    def write(source: str, target: Path) -> Any:
        named: Any = {f"group_{number}": {"targets": ["Linear"], **group} for number, group in enumerate(groups)}
        model = load(source)
        apply_quantization_config(model, QuantizationConfig(config_groups=named, **{"ignore": ["lm_head"], **more}))
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is not None and scheme.weights is not None and hasattr(module, "weight"):
                set_ranges(module, scheme.weights)
            for name in ("k_scale", "v_scale"):
                if hasattr(module, name):
                    getattr(module, name).data.fill_(0.25)
        # With several schemes transformers dequantises everything by the first one, so the logits are computed before
        # compression.
        rounded = logits(model) if len(groups) > 1 else None
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(target)
        compressor.update_config(str(target))
        return CompressedTensorsConfig(dequantize=True) if len(groups) == 1 else rounded

    return write


def mxfp4(source: str, target: Path) -> Any:
    quantized_checkpoints.write_mxfp4(Path(source), target)
    from transformers.utils.quantization_config import Mxfp4Config

    return Mxfp4Config(dequantize=True)


def set_ranges(module: Any, args: Any) -> None:
    low, high = quantized_checkpoints.ranges(module.weight, args)
    whole = {}
    if hasattr(module, "weight_global_scale"):
        whole = {"global_scale": generate_gparam(module.weight.min(), module.weight.max())}
        module.weight_global_scale.data.copy_(whole["global_scale"])
    scale, zero = calculate_qparams(low, high, args, **whole)
    module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))


def load(path: str, settings: Any = None) -> Any:
    more = {} if settings is None else {"quantization_config": settings}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more).eval()


def logits(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return list(model(torch.tensor(IDS), use_cache=False).logits.float())


def reference(path: str, settings: Any) -> list[torch.Tensor]:
    """Return the logits of transformers with the weights that it reads, and unquantised activations."""
    model = load(path, settings)
    kind = json.loads((Path(path) / "config.json").read_text())["quantization_config"]["quant_method"]
    if kind == "bitsandbytes":
        model = model.dequantize().float()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if hasattr(parameter, "dequantize") and type(parameter.data) is not torch.Tensor:
                setattr(module, name, torch.nn.Parameter(parameter.detach().dequantize()))
    return logits(model)


WHOLE4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {**FLOAT8, "strategy": "token", "dynamic": True}
FORMS: dict[str, tuple[str, Write]] = {
    "nf4, nested, kept as bfloat16": (
        "llama",
        saved(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
    ),
    "fp4, experts": ("qwen3_moe", saved(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "int8, some skipped": ("llama", saved(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "down_proj"])),
    "torchao int8": ("llama", torchao(Int8WeightOnlyConfig())),
    "torchao int8 of whole tensors": ("llama", torchao(Int8WeightOnlyConfig(granularity=PerTensor()))),
    "torchao int8, dynamic": ("llama", torchao(Int8DynamicActivationInt8WeightConfig())),
    "torchao fp8": ("llama", torchao(Float8WeightOnlyConfig())),
    "torchao 4 bits unpacked, the embedding too": (
        "llama",
        torchao(
            IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32)),
            include_input_output_embeddings=True,
        ),
    ),
    "torchao 4 bits, activations of 8": (
        "llama",
        torchao(Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=PerGroup(32))),
    ),
    "torchao experts": (
        "qwen3_moe",
        torchao(
            FqnToConfig(
                OrderedDict(
                    {
                        r"re:.*mlp\.experts\.gate_up_proj": Int8WeightOnlyConfig(),
                        r"re:.*mlp\.experts\.down_proj": Float8WeightOnlyConfig(),
                        r"re:.*self_attn\.[qkvo]_proj": Int8WeightOnlyConfig(),
                    }
                )
            )
        ),
    ),
    "pack-quantized": ("llama", compressed({"weights": WHOLE4})),
    "pack-quantized with zeros, by names": (
        "llama",
        compressed(
            {"weights": {**WHOLE4, "symmetric": False}, "targets": [r"re:.*self_attn\.[qkvo]_proj$"]},
            {"weights": {**WHOLE4, "num_bits": 3, "actorder": "weight"}, "targets": [r"re:.*mlp\..*"]},
            ignore=["lm_head", r"re:.*layers\.1\.mlp\.up_proj"],
        ),
    ),
    "pack-quantized of 6, 7 and 5 bits": (
        "llama",
        compressed(
            {"weights": {**WHOLE4, "num_bits": 6}, "targets": [r"re:.*self_attn\..*"]},
            {"weights": {**WHOLE4, "num_bits": 7}, "targets": [r"re:.*(gate|up)_proj"]},
            {
                "weights": {"num_bits": 5, "type": "int", "strategy": "channel"},
                "targets": [r"re:.*down_proj"],
            },
        ),
    ),
    "int-quantized": (
        "llama",
        compressed(
            {
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        ),
    ),
    "naive-quantized": (
        "llama",
        compressed({"weights": {**WHOLE4, "num_bits": 8}}, format="naive-quantized"),
    ),
    "float-quantized of whole tensors, a cache too": (
        "llama",
        compressed(
            {
                "weights": {**FLOAT8, "strategy": "tensor"},
                "input_activations": {**FLOAT8, "strategy": "tensor", "dynamic": False},
            },
            kv_cache_scheme={**FLOAT8, "strategy": "tensor", "dynamic": False},
        ),
    ),
    "float-quantized in blocks that do not divide": (
        "llama",
        compressed(
            {
                "weights": {**FLOAT8, "strategy": "block", "block_structure": [40, 48]},
                "input_activations": {**DYNAMIC, "strategy": "group", "group_size": 128},
            }
        ),
    ),
    "mxfp8": ("llama", compressed({"weights": {**FLOAT8, "strategy": "group", "group_size": 32}})),
    "mxfp6": (
        "llama",
        compressed({"weights": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}}),
    ),
    "mxfp4 of gpt-oss": ("gpt_oss", mxfp4),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_library_on_one_rank_and_on_two(form: str, tmp_path: Path) -> None:
    family, write = FORMS[form]
    source = tiny_checkpoints.cached(family, **SHAPES[family])
    found = write(source, tmp_path)
    wanted = found if isinstance(found, list) else reference(str(tmp_path), found)
    ordinary = paged_forward.all_logits(paged_forward.load(source), IDS, 16)
    for theirs, before in zip(wanted, ordinary, strict=True):
        assert float((theirs - before).abs().max()) > 0.02 * float(theirs.std())  # the weights were really quantised
    check(str(tmp_path), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("gptq", {"order": True}),
        ("gptq", {"bits": 8, "version": 2}),
        ("awq", {}),
        ("fp8", {"scope": "block"}),
        ("fp8", {"scope": "tensor", "static": True}),
        ("compressed-tensors", {"preset": "W4A16", "symmetric": False}),
        ("compressed-tensors", {"preset": "W8A8"}),
        ("bitsandbytes", {"kind": "nf4", "nested": True}),
        ("torchao", {"kind": "int4"}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_layout_on_one_rank_and_on_two(
    form: str, options: dict[str, Any], family: str, tmp_path: Path
) -> None:
    path, plain = quantized_checkpoints.write(tmp_path, form, family, **options)
    check(path, [tiny_checkpoints.reference(plain, ids) for ids in IDS])


def check(path: str, wanted: list[torch.Tensor]) -> None:
    ranks = ranks_in_threads.Ranks(2)
    one = paged_forward.all_logits(paged_forward.load(path), IDS, 16)
    two = ranks.run(lambda rank: paged_forward.all_logits(paged_forward.load(path, group=rank), IDS, 16))[0]
    for mine, halves, theirs in zip(one, two, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-3 * float(theirs.std()))
        torch.testing.assert_close(halves, mine, rtol=0, atol=1e-3 * float(theirs.std()))
