"""Image-text architectures of transformers without a test of their own answer about an image, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_registered
from bench import seeing

PAGE = Path(__file__).parents[2] / "docs" / "image-models.md"
ANSWER = (
    "deepseek_ocr2", "deepseek_vl", "got_ocr2", "granite_docling", "hyperclovax_vision_v2", "kimi_k25", "lfm3_vl",
    "lighton_ocr", "ovis2", "paddleocr_vl", "qwen4_exp", "video_llama_3",
)  # fmt: skip
NEED_TORCHVISION = ("minicpmv4_6", "minicpmv4_7", "phi4_multimodal")
REFUSED = {
    "chameleon": "turns images into token ids",
    "git": "has no placeholder",
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
@pytest.mark.parametrize("model_type", REFUSED)
async def test_other_architectures_are_refused_with_the_reason(model_type: str) -> None:
    found = await seeing.outcome(model_type)
    assert found.result == seeing.REFUSED
    assert REFUSED[model_type] in found.details


def test_every_architecture_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in tiny_registered.ARCHITECTURES if f"| `{name}` |" not in page]
    assert not missing, "run `just image-models`"
