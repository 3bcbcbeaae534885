from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_forward
import tiny_checkpoints
from runtime.errors import CheckpointError
from runtime.loading.facts import read_facts
from runtime.models.refused import REFUSED
from runtime.models.registry import config_of

BARE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def directory(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path)


def test_facts_of_a_written_checkpoint(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path, "qwen3", dtype="bfloat16")
    facts = read_facts(path)
    assert (facts.architecture, facts.path, facts.dtype) == ("Qwen3ForCausalLM", path, "bfloat16")
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (3, 4, 2, 8)
    assert (facts.hidden_size, facts.vocab_size, facts.context_length) == (32, 128, 256)
    assert (facts.eos_ids, facts.bos_id) == ({2}, 1)
    model = paged_forward.load(path, dtype="bfloat16")
    assert facts.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_silent_fields_take_the_defaults_of_the_family(tmp_path) -> None:
    facts = read_facts(directory(tmp_path, BARE))
    assert (facts.num_kv_heads, facts.head_dim, facts.context_length) == (4, 16, 2048)
    assert (facts.dtype, facts.weight_bytes, facts.eos_ids) == ("float32", 0, frozenset())
    qwen = config_of({**BARE, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": None})
    assert (qwen.num_kv_heads, qwen.head_dim) == (4, 128)
    assert qwen.latent_dims is None
    for name, sizes in (("DeepseekV3ForCausalLM", (512, 64)), ("MiniCPM3ForCausalLM", (256, 32))):
        latent = config_of({**BARE, "architectures": [name]})
        assert latent.latent_dims == sizes


def test_ends_and_sampling_come_from_both_files(tmp_path) -> None:
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "do_sample": True, "min_p": None}
    facts = read_facts(directory(tmp_path, {**BARE, "eos_token_id": 2}, generation))
    assert facts.eos_ids == {2, 7, 8}
    assert facts.preferred_sampling == {"temperature": 0.6, "top_k": 20}


def test_dtype_of_the_files_counts_where_the_configuration_is_silent(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path, dtype="float16")
    values = json.loads((tmp_path / "config.json").read_text())
    del values["dtype"]
    assert read_facts(directory(tmp_path, values)).dtype == "float16"
    assert read_facts(path, {"torch_dtype": "bfloat16"}).dtype == "bfloat16"


def test_older_spelling_computes_the_same(tmp_path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = {"rope_type": "llama3", "rope_theta": 500.0, **scaling}
    path = tiny_checkpoints.write(tmp_path, rope_parameters=rope)
    expected = paged_forward.all_logits(paged_forward.load(path), [list(range(30))], 4)[0]
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"], values["dtype"]
    older = {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "float32"}
    path = directory(tmp_path, {**values, **older})
    assert torch.equal(paged_forward.all_logits(paged_forward.load(path), [list(range(30))], 4)[0], expected)


@pytest.mark.parametrize(
    ("file", "overrides", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 9.0}, 9.0),
        ({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 9.0}}, 9.0),
        (
            {"rope_theta": 5.0, "rope_scaling": {"rope_theta": 5.0}},
            {"rope_parameters": {"rope_theta": 9.0}},
            9.0,
        ),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_scaling": {"type": "linear", "factor": 2}}, 5.0),
    ],
)
def test_overrides_win_in_either_spelling(tmp_path, file, overrides, theta) -> None:
    facts = read_facts(directory(tmp_path, {**BARE, **file}), overrides)
    assert config_of(facts.config).rope().theta == theta


def test_unknown_architecture_is_refused_with_a_hint(tmp_path) -> None:
    path = directory(tmp_path, {**BARE, "architectures": ["LLamaForCausalLM"]})
    with pytest.raises(CheckpointError, match="Did you mean LlamaForCausalLM.*MistralForCausalLM"):
        read_facts(path)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_refused_architectures_say_why(tmp_path, name: str, model_impl: str) -> None:
    path = directory(tmp_path, {**BARE, "architectures": [name]})
    with pytest.raises(CheckpointError, match=f"{name} is not supported: its .*; use "):
        read_facts(path, model_impl=model_impl)


GLM = {"padded_vocab_size": 100, "num_layers": 2, "ffn_hidden_size": 96, "seq_length": 128}
BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("MiniCPMForCausalLM", {"num_experts": 8}, "with experts"),
        ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}, "sparse attention"),
        ("ChatGLMModel", {"position_encoding_2d": True}, "first generation"),
        ("ChatGLMModel", {**GLM, "add_bias_linear": True}, "add_bias_linear True is not supported"),
        ("ChatGLMModel", {**GLM, "rmsnorm": False}, "rmsnorm False is not supported"),
        ("DeciLMForCausalLM", {}, "block_configs must be a list of 2 objects"),
        ("DeciLMForCausalLM", {"block_configs": [BLOCK]}, "block_configs must be a list of 2 objects"),
        (
            "DeciLMForCausalLM",
            {"block_configs": [BLOCK, {**BLOCK, "attention": {"n_heads_in_group": 4}}]},
            "n_heads_in_group must be the same",
        ),
    ],
)
def test_forms_of_published_models_that_are_not_supported(
    tmp_path, architecture: str, values: dict[str, Any], reason: str
) -> None:
    path = directory(tmp_path, {**BARE, "architectures": [architecture], **values})
    with pytest.raises(CheckpointError, match=reason):
        read_facts(path)


def test_known_one_of_several_architectures_is_taken(tmp_path) -> None:
    path = directory(tmp_path, {**BARE, "architectures": ["Strange", "LlamaForCausalLM"]})
    assert read_facts(path).architecture == "LlamaForCausalLM"


def test_a_reward_model_has_one_label_wherever_its_architecture_is_listed(tmp_path) -> None:
    facts = read_facts(directory(tmp_path, {**BARE, "architectures": ["LlamaForRewardModel", "Other"]}))
    assert (facts.architecture, facts.labels) == ("LlamaForRewardModel", ("reward",))
    assert facts.score_activation == ""


def test_directory_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        read_facts(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_facts(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_broken_json_is_refused(tmp_path, text) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_facts(str(tmp_path))


WRONG = [
    {"text_config": None},
    {"text_config": True},
    {"text_config": "large"},
    {"hidden_size": 0},
    {"hidden_size": "64"},
    {"hidden_size": None},
    {"hidden_size": 66},
    {"num_hidden_layers": -1},
    {"num_attention_heads": True},
    {"num_key_value_heads": 3},
    {"vocab_size": 1.5},
    {"head_dim": 15},
    {"max_position_embeddings": 10**12},
    {"rms_norm_eps": 0},
    {"rms_norm_eps": float("nan")},
    {"hidden_act": "sine"},
    {"torch_dtype": "int8"},
    {"tie_word_embeddings": "yes"},
    {"eos_token_id": "2"},
    {"architectures": None},
    {"quantization_config": {"quant_method": "hqq"}},
    {"rope_theta": -1},
    {"rope_scaling": "linear"},
    {"rope_scaling": {"type": "spiral"}},
    {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": {"type": "linear", "factor": 0}},
    {"rope_scaling": {"type": "yarn"}},
    {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
    {"rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1]}},
    {"rope_parameters": {"partial_rotary_factor": 1.5}},
]


@pytest.mark.parametrize("values", WRONG, ids=json.dumps)
def test_values_that_make_no_sense_are_refused_by_name(tmp_path, values) -> None:
    path = directory(tmp_path, {**BARE, **values})
    with pytest.raises(CheckpointError) as error:
        read_facts(path)
    name, value = next(iter(values.items()))
    field = next(iter(reversed(value))) if isinstance(value, dict) else name
    assert any(word in str(error.value) for word in (name, field, "kv heads", "quantized"))


def test_reading_facts_does_not_import_torch() -> None:
    code = "import runtime.modeling.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
