from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.families import END, FAMILIES, Family, write_family

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"],
    "vocab_size": 320,
}


def tiny(name: str) -> Family:
    """The family with every size that it names made small."""
    family = FAMILIES[name]
    return Family(family.about, family.model_type, {key: TINY.get(key, value) for key, value in family.values.items()})


@pytest.mark.parametrize(
    ("name", "millions", "active"), [("M", 426, 150), ("D", 637, 304), ("G", 268, 268), ("H", 152, 152)]
)
def test_named_families_have_the_size_that_they_say(name: str, millions: int, active: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[name]
    kinds: Any = CONFIG_MAPPING
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(kinds[family.model_type](**family.values, **END))
    sizes = {key: weight.numel() for key, weight in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    of_all = family.values.get("num_experts") or family.values.get("n_routed_experts") or 1
    idle = experts - experts * family.values.get("num_experts_per_tok", 0) // of_all
    assert round(sum(sizes.values()) / 1e6) == millions
    assert round((sum(sizes.values()) - idle) / 1e6) == active


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_family(tiny(name), tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == 320
