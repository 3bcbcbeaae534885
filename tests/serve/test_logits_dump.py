"""Options that dump the logits of steps, which must equal those of transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from serve import Engine
from serve.cli.main import REFUSED

PROMPT = [5, 9, 17, 3, 200]


def reference(path: str, ids: list[int]) -> np.ndarray:
    """Return the logits [T, V] of every position."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


async def test_logits_of_every_step_are_written(tmp_path: Path):
    path = tiny_checkpoints.cached(vocab_size=300)
    async with Engine(path, skip_tokenizer_init=True, debug_tensor_dump_output_folder=str(tmp_path)) as engine:
        greedy = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = await engine.generate(input_ids=PROMPT, sampling_params=greedy, rid="mine")
    steps = [np.load(file) for file in sorted(tmp_path.glob("step-*.npz"))]
    expected = reference(path, PROMPT + answer["output_ids"])
    for position, step in enumerate(steps[:3], start=len(PROMPT)):
        assert (step["rids"].tolist(), step["positions"].tolist()) == (["mine"], [position])
        np.testing.assert_allclose(step["logits"][0], expected[position - 1], atol=2e-4)


def test_server_computes_a_file_and_ends(tmp_path: Path):
    path = tiny_checkpoints.cached(vocab_size=300)
    np.save(tmp_path / "ids.npy", np.array(PROMPT))
    (tmp_path / "no.npy").write_text("[1, 2]")

    def serve(name: str) -> subprocess.CompletedProcess[str]:
        words = ["--model-path", path, "--skip-tokenizer-init", "--port", "0", "--log-level", "error"]
        words += ["--debug-tensor-dump-output-folder", str(tmp_path / "made" / "here")]
        words += ["--debug-tensor-dump-input-file", str(tmp_path / name)]
        return subprocess.run([sys.executable, "-m", "serve", *words], capture_output=True, text=True, timeout=60)

    done = serve("ids.npy")
    assert done.returncode == 0, done.stderr
    step = np.load(tmp_path / "made" / "here" / "step-000000.npz")
    np.testing.assert_allclose(step["logits"][0], reference(path, PROMPT)[-1], atol=2e-4)
    for wrong in ("no.npy", "none.npy"):
        done = serve(wrong)
        assert done.returncode == REFUSED
        assert "cannot be read" in done.stderr
