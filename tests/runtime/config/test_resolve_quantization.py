"""`--quantization` with checkpoints of different formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.machine import Machine
from runtime.config import Args
from runtime.config.model_facts import ModelFacts
from runtime.config.options.model import QuantArgs
from runtime.config.plan import ModelPlan
from runtime.config.quantization import FORMATS, METHODS, UNREADABLE
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from small_facts import FACTS

CPU = Machine.named("cpu")


def model(facts: ModelFacts = FACTS, **keywords: Any) -> ModelPlan:
    return resolve(Args.of(model_path="/models/small", **keywords), CPU, facts).model


@pytest.mark.parametrize("stored", FORMATS)
def test_a_form_may_be_named_and_need_not(stored: str) -> None:
    facts = replace(FACTS, quantization=stored)
    names = {stored, *FORMATS[stored].asked} & set(
        QuantArgs.__dataclass_fields__["quantization"].metadata["spec"].choices
    )
    for name in [None, *sorted(names - METHODS.keys())]:
        made = model(facts, quantization=name)
        assert made.quantization is None
        assert stored in made.reasons["quantization"]


def test_another_form_than_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the checkpoint's format is gptq"):
        model(replace(FACTS, quantization="gptq"), quantization="awq")
    with pytest.raises(ConfigurationError, match="the checkpoint is not quantised; use w4a16 or w4a8 or w8a8_int8"):
        model(quantization="awq")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("bitsandbytes", "BitsAndBytesConfig"),
        ("gguf", "llama.cpp"),
    ],
)
def test_whoever_asks_for_a_form_that_is_not_there_learns_how_to_get_it(name: str, how: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"use w4a16 or w4a8 or w8a8_int8.* a checkpoint in this format, .*{how}"
    ):
        model(quantization=name)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_nothing_reads_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--quantization {name} is not possible: its weights"):
        model(quantization=name)


@pytest.mark.parametrize("name", ["fp8", "w8a8_fp8"])
def test_fp8_rounds_unquantised_checkpoints_only(name: str) -> None:
    assert model(quantization=name).quantization == name
    settings = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
    stored = replace(FACTS, quantization="compressed-tensors", config={"quantization_config": settings})
    assert model(stored, quantization=name).quantization is None
    settings["config_groups"]["group_0"]["weights"]["type"] = "int"
    with pytest.raises(ConfigurationError, match="the checkpoint's format is compressed-tensors"):
        model(stored, quantization=name)
    with pytest.raises(ConfigurationError, match="the checkpoint's format is gptq"):
        model(replace(FACTS, quantization="gptq"), quantization=name)


def test_load_format_bitsandbytes_needs_such_a_checkpoint() -> None:
    stored = replace(FACTS, quantization="bitsandbytes")
    for name in (None, "bitsandbytes"):
        made = model(stored, load_format="bitsandbytes", quantization=name)
        assert (made.load_format, made.quantization) == ("auto", None)
    with pytest.raises(
        ConfigurationError, match="needs a checkpoint that bitsandbytes quantised.*this one is not quan"
    ):
        model(load_format="bitsandbytes")
    with pytest.raises(ConfigurationError, match="this one is awq"):
        model(replace(FACTS, quantization="awq"), load_format="bitsandbytes")


def test_any_checkpoint_may_be_rounded_to_8_bits() -> None:
    assert model(replace(FACTS, quantization="gptq"), quantization="w8a8_int8").quantization == "w8a8_int8"


def test_a_cpu_computes_rounded_half_precision_in_bfloat16() -> None:
    half = replace(FACTS, dtype="float16")
    assert model(half).dtype == "float16"
    assert model(replace(half, quantization="gptq")).dtype == "bfloat16"
    assert model(replace(half, quantization="gptq"), dtype="half").dtype == "float16"
