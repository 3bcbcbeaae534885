"""Models without a family of ours, served through transformers' modules: tokens are those of transformers alone."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_checkpoints
from runtime.errors import CheckpointError, ConfigurationError
from runtime.models.config import read_facts
from serve import Engine
from tiny_checkpoints import redraw

# Whatever of these a configuration has.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16, "sliding_window": 9,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 256, "rotary_dim": 8,
    "d_model": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_layers": 2,
    "embedding_size": 64,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24,
}  # fmt: skip
PROMPTS = [[3 + 2 * index + row for index in range(5 + 6 * row)] for row in range(4)]
NEW_TOKENS = 10


@cache
def checkpoint(model_type: str) -> str:
    """A checkpoint of this kind in a folder that goes with the process."""
    folder = str(Path(_scratch().name) / model_type)
    model = AutoModelForCausalLM.from_config(config(model_type), dtype=torch.float32)
    redraw(model, seed=0)
    model.save_pretrained(folder)
    return folder


def config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    values = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
    if getattr(usual, "sliding_window", None) is None:
        values.pop("sliding_window", None)
    if "kv_lora_rank" in values:  # latent attention has a key for each head, of two parts
        values |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in values else {})
    return kind(**values)


def greedy(model_type: str) -> list[list[int]]:
    """The tokens that transformers chooses for each of `PROMPTS`, one whole pass for each."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(model_type), dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="transformers-models-")


COMMON = ("deepseek_v3", "gpt2", "gpt_oss", "mixtral", "starcoder2")
MORE = (
    "afmoe", "apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "cwm", "deepseek_v2", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "jais2", "laguna",
    "llama", "mellum", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "modernbert-decoder",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma", "youtu",
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "max_total_tokens": 2048,
    "page_size": 16,
    "chunked_prefill_size": 16,
}
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


async def served(path: str, **options: Any) -> list[list[int]]:
    """Together, in chunks, and again from the prefix cache."""
    async with Engine(path, **OPTIONS, **options) as engine:
        first, second = [
            [
                answer["output_ids"]
                for answer in await engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
            ]
            for _ in range(2)
        ]
    assert first == second
    return first


@pytest.mark.parametrize("model_type", COMMON)
async def test_tokens_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type)
    assert await served(path, model_impl="transformers") == greedy(model_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [kind for kind in MORE if kind in CONFIG_MAPPING]
)  # by transformers' version
async def test_tokens_of_many_more_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type)
    assert await served(path, model_impl="transformers") == greedy(model_type)


async def test_a_model_without_a_family_needs_no_option() -> None:
    path = checkpoint("persimmon")
    assert read_facts(path).by_transformers
    assert await served(path) == greedy("persimmon")
    assert not read_facts(tiny_checkpoints.cached()).by_transformers
    with pytest.raises(CheckpointError, match="PersimmonForCausalLM is not supported"):
        read_facts(path, model_impl="native")


async def test_logprobs_and_vectors_come_from_the_same_modules() -> None:
    path = checkpoint("starcoder2")
    async with Engine(path, **OPTIONS, model_impl="transformers") as engine:
        answer = await engine.generate(
            input_ids=PROMPTS[1],
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        vector = (await engine.encode(input_ids=PROMPTS[1]))["embedding"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.tensor([PROMPTS[1]]), output_hidden_states=True, use_cache=False)
    scores = output.logits[0].log_softmax(-1)
    wanted = [float(scores[index, token]) for index, token in enumerate(PROMPTS[1][1:])]
    found = [pair[0] for pair in answer["meta_info"]["input_token_logprobs"][1:]]
    assert found == pytest.approx(wanted, abs=1e-4)
    last = torch.nn.functional.normalize(output.hidden_states[-1][0, -1], dim=-1)
    assert vector == pytest.approx(last.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bloom", "attention of its own making"),
        ("gptj", "attention of its own making"),
        ("falcon_mamba", "layers of the kind linear_attention"),
        ("bert", "attention to later tokens"),
    ],
)
def test_what_cannot_be_served_so_is_refused_with_the_reason(
    model_type: str, why: str, tmp_path: Path
) -> None:
    small = config(model_type)
    small.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    name = AutoModelForCausalLM._model_mapping[type(small)].__name__  # pyright: ignore
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": [name]}))
    with pytest.raises(CheckpointError, match=why):
        read_facts(str(tmp_path))


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    values = {
        "architectures": ["NoSuchForCausalLM"],
        "model_type": "nosuch",
        "auto_map": {"AutoModel": "x.py"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="code that comes with the checkpoint is not run"):
        read_facts(str(tmp_path))


@pytest.mark.parametrize("change", ["missing", "renamed", "misshapen"])
async def test_tensors_that_do_not_fit_are_named(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("persimmon"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.dense_h_to_4h.weight"
    tensor = tensors.pop(name)
    if change == "renamed":
        tensors[name + "s"] = tensor
    if change == "misshapen":
        tensors[name] = tensor[:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.dense_h_to_4h\.weight"):
        async with Engine(str(folder), **OPTIONS):
            pass


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}, {"quantization": "w8a8_int8"}])
async def test_what_only_families_of_ours_can_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="transformers' modules"):
        async with Engine(checkpoint("persimmon"), **OPTIONS, **options):
            pass


async def test_a_model_that_mixes_tokens_elsewhere_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial before serving notices; here the norm of the first layer sees the token before."""
    from transformers.models.persimmon import modeling_persimmon

    forward = modeling_persimmon.PersimmonMLP.forward
    monkeypatch.setattr(
        modeling_persimmon.PersimmonMLP, "forward", lambda self, x: forward(self, x.roll(1, 1) + x)
    )
    with pytest.raises(CheckpointError, match="logits differ"):
        async with Engine(checkpoint("persimmon"), **OPTIONS):
            pass
