from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from bench.checkpoints import SHAPES, Shape, main, model_config, parameter_sizes, write_checkpoint
from runtime.loading.facts import read_facts
from serve.bench.workload import Vocabulary

TINY = Shape(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=400, tied=False, context=64)
TINY_QWEN = Shape(
    hidden=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=24,
    vocab=400,
    tied=True,
    qk_norm=True,
    context=64,
)


@pytest.mark.parametrize("shape", [TINY, TINY_QWEN])
def test_transformers_loads_the_checkpoint_completely(tmp_path: Path, shape: Shape) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(shape, tmp_path, "float32")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == 400


def test_the_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path)
    known = Vocabulary.of_tokenizer(str(tmp_path))
    assert len(known.ids) == 400 - 3
    assert known.decode(known.encode("an unknown word ü")) == "an unknown word ü"
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert "add_generation_prompt" in template


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        write_checkpoint(TINY, tmp_path / name, seed=seed)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            return bytes(file.get_tensor("lm_head.weight").float().numpy().tobytes())

    assert weights("a", 1) == weights("b", 1)
    assert weights("c", 2) != weights("a", 1)


@pytest.mark.parametrize(
    ("name", "millions"), [("T", 24), ("S", 135), ("Q", 596), ("L", 4022), ("Q8", 8191), ("L8", 8030)]
)
def test_named_shapes_have_the_size_of_their_models(name: str, millions: int) -> None:
    num = 0
    for _, size in parameter_sizes(SHAPES[name]):
        product = 1
        for length in size:
            product *= length
        num += product
    assert round(num / 1e6) == millions


def test_the_config_names_the_architecture() -> None:
    assert model_config(TINY, "bfloat16")["architectures"] == ["LlamaForCausalLM"]
    assert model_config(TINY_QWEN, "bfloat16")["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [("Q8", 40_960), ("L8", 131_072)])
def test_a_shape_without_weights_is_read_as_a_model(tmp_path: Path, name: str, context: int) -> None:
    assert main(["--shape", name, "--output", str(tmp_path), "--no-weights"]) == 0
    facts = read_facts(str(tmp_path))
    assert (facts.context_length, facts.weight_bytes, facts.dtype) == (context, 0, "bfloat16")
    assert Vocabulary.of_tokenizer(str(tmp_path)).count("a text") > 0
