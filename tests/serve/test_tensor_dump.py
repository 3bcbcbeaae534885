"""Options that dump the hidden states and logits of steps, which must equal those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from runtime.errors import ConfigurationError
from serve import Engine, SyncEngine
from serve.server.process import read_prompt

PROMPT = [5, 9, 17, 3, 200]
GREEDY = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


def reference(path: str, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the hidden states [T, E] after the embedding and after each layer, and the logits [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True)
    return [each[0] for each in found.hidden_states], found.logits[0]


def steps(folder: Path) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Return the tensors and the request labels of each step."""
    found = []
    for file in sorted(folder.glob("step-*.safetensors")):
        with safe_open(file, "pt") as content:
            rids = json.loads(content.metadata()["rids"])
        found.append((load_file(file), rids))
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="dense"),
        pytest.param("llama", {"model_impl": "transformers"}, id="transformers"),
        pytest.param("qwen3_moe", {"tp_size": 2}, id="experts-tp", marks=pytest.mark.slow),
        pytest.param("granite", {}, id="whole-sums", marks=pytest.mark.slow),
    ],
)
async def test_every_layer_of_every_step_is_written(family: str, options: dict[str, Any], tmp_path: Path):
    path = tiny_checkpoints.cached(family, vocab_size=300)
    options = {**options, "debug_tensor_dump_output_folder": str(tmp_path), "chunked_prefill_size": 4, "page_size": 4}
    async with Engine(path, skip_tokenizer_init=True, **options) as engine:
        answer = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="mine")
    ids, count = PROMPT + answer["output_ids"], 0
    hidden, logits = reference(path, ids)
    for tensors, rids in steps(tmp_path):  # the prompt in two chunks, then one token a step
        assert set(rids) == {"mine"}
        part = tensors["positions"]
        assert part.tolist() == list(range(count, count + len(part)))
        assert tensors["input_ids"].tolist() == [ids[position] for position in part]
        for index, expected in enumerate(hidden[1:-1]):  # transformers' last states have the final norm
            torch.testing.assert_close(tensors[f"layers.{index}"], expected[part], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(tensors["hidden"], hidden[-1][part], atol=2e-4, rtol=1e-4)
        count += len(part)
        assert ("logits" in tensors) == (count >= len(PROMPT))
        if "logits" in tensors:
            sampled = part[tensors["sampled"]]
            torch.testing.assert_close(tensors["logits"], logits[sampled], atol=2e-4, rtol=1e-4)
    assert count >= len(ids) - 1


def test_server_computes_a_file_and_ends(tmp_path: Path):
    path = tiny_checkpoints.cached(vocab_size=300)
    np.save(tmp_path / "ids.npy", np.array(PROMPT))
    (tmp_path / "no.npy").write_text("[1, 2]")
    folder = tmp_path / "made" / "here"

    words = ["--model-path", path, "--skip-tokenizer-init", "--port", "0", "--log-level", "error"]
    words += ["--debug-tensor-dump-output-folder", str(folder), "--debug-tensor-dump-layers", "1"]
    words += ["--debug-tensor-dump-input-file", str(tmp_path / "ids.npy")]
    done = subprocess.run([sys.executable, "-m", "serve", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (first, _), *_ = steps(folder)
    hidden, logits = reference(path, PROMPT)
    torch.testing.assert_close(first["logits"][0], logits[-1], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(first["hidden"], hidden[-1], atol=2e-4, rtol=1e-4)
    assert [name for name in first if name.startswith("layers")] == ["layers.1"]
    for wrong in ("no.npy", "none.npy"):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            read_prompt(str(tmp_path / wrong))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"debug_tensor_dump_layers": [9]}, "the model has 3 layers"),
        ({"dp_size": 2}, "leave --dp-size out"),
        (
            {"debug_tensor_dump_layers": [0], "debug_tensor_dump_output_folder": None},
            "needs --debug-tensor-dump-output",
        ),
    ],
)
def test_dumps_that_cannot_be_written_are_refused(options: dict[str, Any], reason: str, tmp_path: Path):
    path = tiny_checkpoints.cached(vocab_size=300)
    options = {"debug_tensor_dump_output_folder": str(tmp_path), **options}
    with pytest.raises(ConfigurationError, match=reason), SyncEngine(path, skip_tokenizer_init=True, **options):
        pass
