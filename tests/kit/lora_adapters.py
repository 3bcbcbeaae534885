"""LoRA adapters with random weights, written by peft, and what peft answers with them."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

import tiny_checkpoints
from greedy import NUM_NEW
from runtime.layers.moe import BLOCK

_FOLDER = TemporaryDirectory(prefix="penstock-adapters-")


@cache
def adapter(base: str, seed: int, rank: int = 8, targets: Any = "all-linear", **settings: Any) -> str:
    """The folder of an adapter of this checkpoint. All values are redrawn, so that it changes most tokens."""
    model = _base(base)
    targets = list(targets) if isinstance(targets, tuple) else targets
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **settings)
    adapted = peft.get_peft_model(model, config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(_redrawn(name, parameter, random))
    folder = Path(_FOLDER.name, str(len(list(Path(_FOLDER.name).iterdir()))))
    adapted.save_pretrained(str(folder))
    return str(folder)


def _redrawn(name: str, parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=random)
    if "magnitude" in name:
        return parameter * (1 + 0.3 * noise)
    if "lora_embedding_A" in name or "trainable_tokens" in name:
        return 0.5 * noise
    return noise * parameter.shape[1] ** -0.5 * 0.5


@cache
def linear_layers(base: str) -> str:
    """All linear layers that adapters may change: none of routed experts, of eyes, or of expanded latent vectors.

    As a regular expression: for a list of names, peft also takes the experts' parameters. In some models it takes them
    for the names of dense layers too.
    """
    model = _base(base)
    others = ("vision", "visual", "multi_modal", "lm_head", "kv_b_proj", ".router")
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        others += ("gate_proj", "up_proj", "down_proj")
    names = [
        re.escape(name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in others)
    ]
    return "|".join(names)


@cache
def adapted_model(base: str, folder: str) -> Any:
    return peft.PeftModel.from_pretrained(_base(base), folder).eval()


def adapted(base: str, folder: str | None, prompt: list[int]) -> list[int]:
    """What peft answers greedily with this adapter, or transformers without one."""
    return list(_adapted(base, folder, tuple(prompt)))


@cache
def _adapted(base: str, folder: str | None, prompt: tuple[int, ...]) -> list[int]:
    model = _base(base) if folder is None else adapted_model(base, folder)
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(prompt) :].tolist()


def merged_pair(base: str, folder: Path, rank: int = 8) -> tuple[str, str]:
    """An adapter of every matrix in the blocks of a checkpoint, by its stored name, and the checkpoint it merges to."""
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    shutil.copytree(base, merged)
    tensors, random = load_file(merged / "model.safetensors"), torch.Generator().manual_seed(1)
    pairs: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if BLOCK.search(name) and weight.dim() == 2:
            a = torch.randn(rank, weight.shape[1], generator=random) * weight.shape[1] ** -0.5
            b = torch.randn(weight.shape[0], rank, generator=random) * rank**-0.5
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            pairs |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            tensors[name] = weight + 0.5 * b @ a
    save_file(pairs, adapter / "adapter_model.safetensors")
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank // 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return str(adapter), str(merged)


def _base(path: str) -> Any:
    """A new model each time: peft changes it."""
    return tiny_checkpoints.auto_of(path).from_pretrained(tiny_checkpoints.readable(path), dtype=torch.float32)
