"""Adapters that change more than linear layers, and DoRA: tokens equal those of peft."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tiny_foreign
from greedy import model_path
from lora_adapters import adapter, linear_layers
from lora_engine import PLAIN, answers, expected
from quantized_checkpoints import SHAPE, write_mxfp4
from runtime.errors import InvalidRequest
from serve import Engine
from tiny_checkpoints import cached

_FOLDER = TemporaryDirectory(prefix="penstock-foreign-")
CHANGES: dict[str, dict[str, Any]] = {
    "vocabulary": {"targets": ("embed_tokens", "lm_head", "q_proj")},
    "head alone": {"targets": ("lm_head",)},
    "tokens": {"targets": ("v_proj",), "trainable_token_indices": tuple(range(0, 90, 2))},
    "dora": {"targets": "all-linear", "use_dora": True},
}
SETTINGS = [
    pytest.param({}, id="default"),
    pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
    pytest.param({"pp_size": 2}, id="pp", marks=pytest.mark.slow),
    pytest.param({"chunked_prefill_size": 16, "page_size": 4, "max_loras_per_batch": 2}, id="chunked, two slots"),
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_every_change_gives_the_tokens_of_peft(settings: dict[str, Any]) -> None:
    base = model_path("llama")
    folders = {name: adapter(base, seed, 8, **change) for seed, (name, change) in enumerate(CHANGES.items())}
    folders["plain"] = adapter(base, 9)
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **{**PLAIN, **settings}) as engine:
        wanted = expected(base, folders, asked)
        assert len({tuple(ids) for ids in wanted[: len(folders) + 1]}) == len(folders) + 1
        with pytest.raises(InvalidRequest, match="unload them first: dora"):
            await engine.update_weights_from_disk(base)
        for _ in range(2):
            assert await answers(engine, asked) == wanted
        engine.core.check()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", pytest.param("phi3", marks=pytest.mark.slow)])
async def test_families_with_biases_scales_and_tied_heads(family: str) -> None:
    base = model_path(family)
    tokens = {"trainable_token_indices": tuple(range(0, 90, 2))}
    folders = {
        "dora": adapter(base, 1, 8, linear_layers(base), use_dora=True),
        "tokens": adapter(base, 2, 8, linear_layers(base), **tokens),
        "embedding": adapter(base, 3, 8, ("embed_tokens",)),
    }
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **PLAIN) as engine:
        wanted = expected(base, folders, asked)
        assert await answers(engine, asked) == wanted


@cache
def foreign(model_type: str) -> str:
    """Write a small checkpoint of a model that transformers computes."""
    config = tiny_foreign.config(model_type)
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # random weights as initialised would give one token for ever
    folder = str(Path(_FOLDER.name, model_type))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", ["gpt2", "opt", pytest.param("mamba2", marks=pytest.mark.slow)])
async def test_models_of_transformers_take_adapters(model_type: str) -> None:
    base = foreign(model_type)
    targets = {"gpt2": ("c_attn", "c_proj", "c_fc"), "mamba2": ("in_proj",)}.get(model_type, "all-linear")
    folders = {
        "a": adapter(base, 1, 4, targets, fan_in_fan_out=model_type == "gpt2"),
        "b": adapter(base, 2, 16, targets, fan_in_fan_out=model_type == "gpt2", use_dora=model_type == "opt"),
        "c": adapter(base, 3, 8, ("lm_head",)),
    }
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **PLAIN) as engine:
        assert engine.core.plan.model.by_transformers
        wanted = expected(base, folders, asked)
        assert len({tuple(ids) for ids in wanted}) > 4
        for _ in range(2):
            assert await answers(engine, asked) == wanted
        engine.core.check()


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


SHARED: dict[str, Any] = {"tp_size": 2, "ep_size": 2}
MOVING: dict[str, Any] = {**SHARED, "enable_eplb": True, "eplb_rebalance_num_iterations": 10}


@pytest.mark.parametrize(
    "ranks",
    [{}, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ({"tp_size": 2}, SHARED, MOVING))],
    ids=["one", "tp", "ep", "ep, moving"],
)
@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)],
)
async def test_adapters_change_routed_experts(family: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    base = model_path(family)
    folders = {
        "experts": adapter(base, 1, 4, ("q_proj", "v_proj"), target_parameters=EXPERTS),
        "down alone": adapter(base, 2, 8, ("k_proj",), target_parameters=EXPERTS[1:]),
    }
    separate = {"one by one": by_expert(Path(folders["experts"]), tmp_path, family)}
    paths = [f"{name}={folder}" for name, folder in {**folders, **separate}.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **ranks, **PLAIN) as engine:
        wanted = expected(base, folders, asked)
        assert wanted[0] != wanted[1] != wanted[2]
        for _ in range(5 if "enable_eplb" in ranks else 1):  # experts move meanwhile
            assert await answers(engine, asked) == wanted
        assert await answers(engine, [("one by one", 5), ("one by one", 17)]) == [wanted[1], wanted[4]]


async def test_adapters_change_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss's experts stay packed in 4 bits, and the tokens are those of peft with the dequantised experts."""
    source, packed, plain = Path(cached("gpt_oss", **SHAPE)), tmp_path / "packed", tmp_path / "plain"
    packed.mkdir()
    write_mxfp4(source, packed)
    copytree(source, plain)
    tensors = load_file(packed / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        parts = (tensors.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        tensors[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folders = {"experts": adapter(str(plain), 1, 4, ("q_proj", "v_proj"), target_parameters=EXPERTS)}
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(str(packed), lora_paths=[f"experts={folders['experts']}"], **PLAIN) as engine:
        wanted = expected(str(plain), folders, asked)
        assert wanted[0] != wanted[1]
        assert await answers(engine, asked) == wanted


def by_expert(folder: Path, target: Path, family: str) -> str:
    """Write the same adapter with a pair for each expert, as for models whose experts are modules of their own."""
    tensors, config = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    rank, found = config["r"], {}
    for name, tensor in tensors.items():
        if ".experts." not in name or name.endswith(".lora_B.weight"):
            found |= {} if ".experts." in name else {name: tensor}
            continue
        prefix = name[: name.index(".experts.")] + ".experts"
        other = tensors[name.replace("lora_A", "lora_B")]
        num_experts = len(tensor) // rank
        a, b = tensor.unflatten(0, (num_experts, rank)), other.unflatten(1, (rank, num_experts))
        down = other.shape[0] == tensors[f"{prefix.replace('mlp.experts', 'self_attn.q_proj')}.lora_A.weight"].shape[1]
        halves = {"down_proj": b}
        if not down:
            gate, up = (b[::2], b[1::2]) if family == "gpt_oss" else b.chunk(2)
            halves = {"gate_proj": gate, "up_proj": up}
        for part, half in halves.items():
            for expert in range(num_experts):
                layer = f"{prefix}.{expert}.{part}"
                found[f"{layer}.lora_A.weight"] = a[expert].contiguous()
                found[f"{layer}.lora_B.weight"] = half[:, :, expert].contiguous()
    save_file({name: tensor.clone() for name, tensor in found.items()}, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": None}))
    return str(target)
