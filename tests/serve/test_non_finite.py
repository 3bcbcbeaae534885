"""Non-finite values end the affected requests with an error that says so, and no other requests."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_checkpoints
from runtime.errors import NotFinite
from serve.python.engine import Engine

BROKEN = 77  # the token whose embedding is NaN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = Path(shutil.copytree(tiny_checkpoints.cached(vocab_size=300, tie_word_embeddings=False), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN, 3] = torch.nan
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("backend", [{}, {"attention_backend": "torch_native"}])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 1, "top_k": 5}]
)
async def test_the_request_ends_with_an_error_and_its_neighbours_do_not(
    folder: Path, backend: dict[str, Any], sampling: dict[str, Any]
) -> None:
    wanted = {**sampling, "max_new_tokens": 12, "ignore_eos": True, "logit_bias": {str(BROKEN): -1000.0}}
    async with Engine(str(folder), skip_tokenizer_init=True, max_total_tokens=512, **backend) as engine:
        alone = await engine.generate(input_ids=[5, 6, 7], sampling_params=wanted)
        for ids in ([BROKEN], [5, BROKEN, 9]):
            neighbour = asyncio.create_task(engine.generate(input_ids=[5, 6, 7], sampling_params=wanted))
            with pytest.raises(NotFinite, match="not finite numbers"):
                await engine.generate(input_ids=ids, sampling_params=wanted)
            assert (await neighbour)["output_ids"] == alone["output_ids"]
        engine.core.check()
        assert engine.status().num_requests == engine.status().num_used_pages == 0


async def test_detection_says_where(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_total_tokens": 512,
        "enable_nan_detection": True,
    }
    async with Engine(str(folder), **options) as engine:
        wanted = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        await engine.generate(input_ids=[5, 6], sampling_params=wanted)
        assert "not finite" not in caplog.text
        with caplog.at_level(logging.ERROR), pytest.raises(NotFinite):
            await engine.generate(input_ids=[5, BROKEN], sampling_params=wanted)
    assert "first in embedding (Embedding), whose weight embedding.weight is not finite" in caplog.text


async def test_detection_changes_no_token(folder: Path) -> None:
    found = []
    for detection in (False, True):
        options = {"skip_tokenizer_init": True, "max_total_tokens": 512, "enable_nan_detection": detection}
        async with Engine(str(folder), **options) as engine:
            wanted = {
                "max_new_tokens": 20,
                "seed": 3,
                "ignore_eos": True,
                "logit_bias": {str(BROKEN): -1000.0},
            }
            found.append((await engine.generate(input_ids=[5, 6], sampling_params=wanted))["output_ids"])
    assert found[0] == found[1]
