"""Checkpoints of every family with names of old and new files, and with one tensor that does not fit."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import paged_forward
import tiny_checkpoints
import tiny_foreign
from runtime.errors import CheckpointError
from runtime.loading.facts import read_facts
from runtime.models.registry import entry, find
from serve import Engine

IDS = list(range(10, 40))
FULL, SLIDING = "full_attention", "sliding_attention"
TYPICAL = ("gemma3", "mixtral")
FAMILIES = [
    pytest.param(family, marks=() if family in TYPICAL else pytest.mark.slow) for family in tiny_checkpoints.FAMILIES
]
# Names of configuration fields before transformers 5, if they differ from the usual names.
OLD_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "stablelm": {"partial_rotary_factor": "rope_pct"},
    "gemma3": {f"{SLIDING}.rope_theta": "rope_local_base_freq"},
}
OLD_NAMES["gemma3_seeing"] = OLD_NAMES["gemma3"]


def logits(path: str) -> torch.Tensor:
    return paged_forward.all_logits(paged_forward.load(path), [IDS], page_size=4)[0]


def as_before(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers 4 wrote it: rope_theta, rope_scaling and torch_dtype."""
    if "text_config" in values:
        values = {**values, "text_config": as_before(family, values["text_config"])}
    old, names = dict(values), OLD_NAMES.get(family, {})
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters", None) or {}
    if FULL in rope:
        [usual] = [name for name in names if name.startswith(SLIDING)] or [None]
        if usual is not None:
            old[names[usual]] = rope[SLIDING]["rope_theta"]
        rope = rope[FULL]
    rope = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is not None:
            old.pop(name, None)
            old[names.get(name, name)] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = rope
    return old


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_old_and_of_new_files_give_the_same_model(family: str, tmp_path: Path) -> None:
    published = tiny_checkpoints.cached(family)
    wanted = logits(published)
    own = tiny_checkpoints.write(tmp_path / "own", family, published_names=False)
    assert torch.equal(logits(own), wanted)
    shutil.copytree(published, tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    old = as_before(family, json.loads(file.read_text()))
    file.write_text(json.dumps(old))
    assert "rope_parameters" not in json.dumps({**old, "vision_config": None})
    assert read_facts(str(tmp_path / "old")).dtype == "float32"
    assert torch.equal(logits(str(tmp_path / "old")), wanted)


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(family: str, published: bool, tmp_path: Path) -> None:
    path = tiny_checkpoints.write(tmp_path, family, max_shard_size="20KB", published_names=published)
    files = {file: load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))}
    places = {name: file for file, tensors in files.items() for name in tensors}
    draw = random.Random(family)
    names = sorted(name for name in places if re.search(r"(^|[.])(layers|h|blocks)[.]", name) and "vision" not in name)
    wide = [name for name in names if len({*files[places[name]][name].shape}) > 1]
    for change in ("removed", "renamed", "transposed", "of another dtype"):
        name = draw.choice(wide if change == "transposed" else names)
        file, tensors = places[name], dict(files[places[name]])
        tensor = tensors.pop(name)
        if change == "renamed":
            tensors[f"{name}s"] = tensor
        if change == "transposed":
            tensors[name] = tensor.transpose(-1, -2).contiguous()
        if change == "of another dtype":
            tensors[name] = tensor.bfloat16()
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            paged_forward.load(path)
        said = str(error.value)
        # A missing tensor is named with the family's name, because the file's name for it is unknown.
        ours = entry(read_facts(path).architecture).tensor_name(name) or ""
        absent = change in ("removed", "renamed")
        assert (ours if absent else name).removesuffix(".weight") in said, (change, name, said)
        assert absent or str(file) in said, (change, name, said)
        save_file(files[file], file, metadata={"format": "pt"})


# Kinds that transformers computes by another kind's class, after converting tensors that have names of their own.
CONVERTED = ("exaone", "sarvam_mla", "sarvam_moe")
OURS = sorted(
    kind
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if isinstance(name, str) and find(name) and kind not in CONVERTED
)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(kind, marks=() if kind in ("gpt_oss", "qwen3_5_moe") else pytest.mark.slow)
        for kind in OURS
        if kind in CONFIG_MAPPING
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_takes(model_type: str, tmp_path: Path) -> None:
    """config.json contains only values that differ from the defaults of its model type."""
    small = tiny_foreign.config(model_type)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    tiny_checkpoints.redraw(model, seed=0)
    model.save_pretrained(tmp_path)
    usual = type(small)()

    def said(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        names = ("architectures", "model_type")
        return {key: value for key, value in values.items() if key in names or defaults.get(key) != value}

    values = json.loads((tmp_path / "config.json").read_text())
    short = said(values, usual.to_dict())
    if "text_config" in short:
        short["text_config"] = said(values["text_config"], usual.get_text_config().to_dict())
    assert len(short) < len(values)
    (tmp_path / "config.json").write_text(json.dumps(short))
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    assert (logits(str(tmp_path)) - wanted).abs().max() < 2e-4


def test_experts_in_one_tensor_may_be_in_one_each(tmp_path: Path) -> None:
    """As in quantised Llama 4 checkpoints. The first files also have a numeric field for the scaling of queries."""
    published = tiny_checkpoints.cached("llama4")
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    stored = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        prefix, together, kind = name.rpartition("experts.")
        if not together:
            stored[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2, dim=1) if kind == "gate_up_proj" else [matrix]
            for part, own in zip(parts, ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), strict=True):
                stored[f"{prefix}experts.{expert}.{own}.weight"] = part.t().contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    for silent in ("no_rope_layers", "layer_types", "moe_layers"):
        assert values.pop(silent)
    values |= {"attn_temperature_tuning": 4, "no_rope_layer_interval": 2, "no_rope_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert torch.equal(logits(str(tmp_path)), logits(published))


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_have_the_usual_names_once_they_were_quantised(family: str, tmp_path: Path) -> None:
    """As llm-compressor writes them: each expert is a separate linear layer."""
    published = tiny_checkpoints.cached(family)
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    stored, usual = {}, {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if found := re.fullmatch(r"(.*experts\.)(gate_up|down)_proj(_bias)?", name):
            prefix, kind, bias = found.groups()
            for expert, each in enumerate(tensor if bias else tensor.mT):
                parts = {"gate_proj": each[::2], "up_proj": each[1::2]} if kind == "gate_up" else {"down_proj": each}
                for own, part in parts.items():
                    suffix = "bias" if bias else "weight"
                    stored[f"{prefix}{expert}.{own}.{suffix}"] = part.contiguous()
        else:
            stored[re.sub(r"\b(w[123])\b", lambda own: usual[own[1]], name)] = tensor
    assert len(stored) > 70
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(str(tmp_path)), logits(published))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt_neox", "mpt"])
async def test_bodies_whose_names_begin_otherwise_than_llamas_load_with_other_heads(
    family: str, head: str, tmp_path: Path
) -> None:
    auto = AutoModelForSequenceClassification if head != "Model" else AutoModel
    changes: dict[str, Any] = {"num_labels": 3} if head != "Model" else {}
    config = tiny_foreign.config(family, **changes)
    model: Any = auto.from_config(config, dtype=torch.float32).eval()
    tiny_checkpoints.redraw(model, seed=0)
    model.save_pretrained(tmp_path)
    assert not read_facts(str(tmp_path)).by_transformers
    async with Engine(str(tmp_path), skip_tokenizer_init=True, log_level="error") as engine:
        [found] = await engine.encode(input_ids=[IDS])
    with torch.no_grad():
        given = model(torch.tensor([IDS]))
    wanted = given.logits[0] if head != "Model" else torch.nn.functional.normalize(given[0][0, -1], dim=0)
    torch.testing.assert_close(torch.tensor(found["embedding"]), wanted, atol=1e-4, rtol=1e-4)


def test_of_baichuan_the_sizes_and_generations_are_told_apart() -> None:
    published = {
        "architectures": ["BaichuanForCausalLM"],
        "vocab_size": 125696,
        "max_position_embeddings": 4096,
    }
    known = entry("BaichuanForCausalLM")
    assert known.values(published)["unit_head"] is True
    assert known.values({**published, "vocab_size": 64000})["unit_head"] is False
    first = {"architectures": ["BaiChuanForCausalLM"], "vocab_size": 64000}
    assert entry("BaiChuanForCausalLM").values(first)["max_position_embeddings"] == 4096
    larger = known.values({**published, "max_position_embeddings": None, "model_max_length": 4096})
    assert (larger["alibi"], larger["max_position_embeddings"]) == (True, 4096)


def test_the_first_files_of_lfm2_say_the_same_in_other_words(tmp_path: Path) -> None:
    published = tiny_checkpoints.cached("lfm2")
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    first = {"full_attn_idxs": [1], "block_ff_dim": values["intermediate_size"], "tie_embedding": True}
    silent = ("layer_types", "tie_word_embeddings", "rope_parameters")
    values = {name: value for name, value in values.items() if name not in silent}
    file.write_text(json.dumps({**values, **first, "intermediate_size": 999}))
    found = logits(str(tmp_path))
    torch.testing.assert_close(found, tiny_checkpoints.reference(str(tmp_path), IDS), atol=1e-4, rtol=0)
    assert torch.equal(found, logits(published))
    with pytest.raises(CheckpointError, match="full_attn_idxs"):
        paged_forward.load(str(tmp_path), {"full_attn_idxs": 1})
