"""Image-text architectures of transformers without a test of their own answer about an image, or are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny_registered
from bench import seeing

PAGE = Path(__file__).parents[2] / "docs" / "image-models.md"
ANSWER = (
    "deepseek_ocr2", "dots3_note", "ernie4_5_vl_moe", "gemma4", "hyperclovax_vision_v2", "lfm3_vl",
    "lighton_ocr", "ovis2", "paddleocr_vl", "qwen4_exp", "video_llama_3",
)  # fmt: skip
NEED_TORCHVISION = ("kimi_k25", "minicpmv4_6", "minicpmv4_7", "phi4_multimodal")
REFUSED = {
    "chameleon": "turns images into token ids",
    "git": "has no placeholder",
    "kosmos-2": "its token ids are not those of the text",
    "instructblip": "also reads the text of the prompt",
    "mllama": "cross-attention",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        *ANSWER,
        *(
            pytest.param(
                each,
                marks=pytest.mark.skipif(not tiny_registered.HAS_TORCHVISION, reason="its processor needs torchvision"),
            )
            for each in NEED_TORCHVISION
        ),
    ],
)
async def test_answers_about_an_image_are_those_of_transformers(model_type: str) -> None:
    found = await seeing.outcome(model_type)
    assert found.result == seeing.EQUAL, found.details


@pytest.mark.slow
async def test_a_gemma_4_without_embeddings_in_every_layer_sees_too() -> None:
    """Gemma 4 31B: sliding and full layers have different KV heads. Images attend to themselves in sliding layers."""
    text = {
        "use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }  # fmt: skip
    found = await seeing.outcome("gemma4", text)
    assert found.result == seeing.EQUAL, found.details


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
async def test_other_architectures_are_refused_with_the_reason(model_type: str) -> None:
    found = await seeing.outcome(model_type)
    assert found.result == seeing.REFUSED
    assert REFUSED[model_type] in found.details


def test_reasons_are_whole_sentences() -> None:
    page = PAGE.read_text(encoding="utf-8")
    reasons = [row.split(" | ")[2].removesuffix(" |") for row in page.splitlines() if " | refused | " in row]
    assert [reason for reason in reasons if re.search(r"(\.\.\.|;|\. \w+)$", reason)] == []


def test_every_architecture_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in tiny_registered.ARCHITECTURES if f"| `{name}` |" not in page]
    assert not missing, "run `just image-models`"
