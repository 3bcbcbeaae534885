"""compressed-tensors and transformers read the output of `penstock quantize`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import paged_forward
import tiny_checkpoints
from quantized_checkpoints import MOE_SHAPE, SHAPE
from runtime.loading.facts import read_facts
from runtime.loading.quantize import METHODS as ROUNDINGS
from serve import Engine
from serve.cli.checkpoints import METHODS
from serve.cli.main import REFUSED, run

IDS = torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(0)).tolist()


def quantize(method: str, source: str, output: Path) -> str:
    assert run(["quantize", "--model-path", source, "--method", method, "--output", str(output)]) == 0
    return str(output)


def in_bfloat16(source: str, target: Path) -> str:
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return str(target)


@pytest.mark.parametrize("method", METHODS)
def test_transformers_reads_the_weights_that_we_read(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_checkpoints.cached("llama", **SHAPE)
    made = quantize(method, source, tmp_path / method)
    assert "MiB of weights" in capsys.readouterr().out
    assert read_facts(made).quantization == "compressed-tensors"
    ours = paged_forward.all_logits(paged_forward.load(made), IDS, 16)[0]
    plain = paged_forward.all_logits(paged_forward.load(source), IDS, 16)[0]
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor(IDS), use_cache=False).logits[0].float()
    spread = float(plain.std())
    # The library also rounds activations if the method does, with fp8 to four significant bits.
    share = {"w4a16": 1e-3, "w8a8": 0.1, "fp8": 0.25}[method]
    assert float((ours - theirs).abs().mean()) < share * spread
    most = {"w4a16": 0.4, "w8a8": 0.1, "fp8": 0.25}[method]
    assert 1e-4 * spread < float((ours - plain).abs().mean()) < most * spread


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_fp8_rounds_while_loading_as_quantize_does(family: str, tmp_path: Path) -> None:
    """Logits of `--quantization fp8` equal those of a checkpoint that `penstock quantize` writes."""
    source = in_bfloat16(
        tiny_checkpoints.cached(family, **(SHAPE if family == "llama" else MOE_SHAPE)), tmp_path / "bfloat16"
    )
    made = quantize("fp8", source, tmp_path / "made")
    answers = []
    for path, name in ((source, "fp8"), (source, "w8a8_fp8"), (made, "fp8"), (made, "w8a8_fp8"), (made, None)):
        async with Engine(path, quantization=name, skip_tokenizer_init=True) as engine:
            result = await engine.generate(
                input_ids=IDS[0],
                sampling_params={"temperature": 0, "max_new_tokens": 12},
                return_logprob=True,
            )
            meta = result["meta_info"]
            answers.append((result["output_ids"], [each[0] for each in meta["output_token_logprobs"]]))
    assert all(each == answers[0] for each in answers[1:])
    async with Engine(source, skip_tokenizer_init=True) as engine:
        result = await engine.generate(
            input_ids=IDS[0], sampling_params={"temperature": 0, "max_new_tokens": 12}, return_logprob=True
        )
        assert [each[0] for each in result["meta_info"]["output_token_logprobs"]] != answers[0][1]


@pytest.mark.parametrize("method", ["w8a8", "fp8"])
def test_rows_of_zeros_in_float16_are_finite(method: str) -> None:
    write, _ = ROUNDINGS[method]
    made = write(torch.zeros(2, 32, dtype=torch.float16))
    assert not made["weight"].float().any()
    assert (made["weight_scale"] > 0).all()


def test_experts_are_rounded_and_routers_are_not(tmp_path: Path) -> None:
    source = tiny_checkpoints.cached("qwen3_moe", **MOE_SHAPE)
    made = quantize("w8a8", source, tmp_path / "made")
    [file] = Path(made).glob("*.safetensors")
    stored = load_file(file)
    assert stored["model.layers.0.mlp.experts.5.up_proj.weight"].dtype == torch.int8
    assert stored["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    ours, plain = (paged_forward.all_logits(paged_forward.load(path), IDS, 16)[0] for path in (made, source))
    assert 0 < float((ours - plain).abs().mean()) < 0.2 * float(plain.std())


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_checkpoints.cached("llama", **SHAPE)
    made = quantize("fp8", source, tmp_path / "made")
    words = ["quantize", "--method", "w4a16", "--output", str(tmp_path / "new"), "--model-path"]
    assert run([*words, made]) == REFUSED
    assert "is quantized already (compressed-tensors)" in capsys.readouterr().err
    assert run(["quantize", "--method", "fp8", "--output", made, "--model-path", source]) == REFUSED
    assert "exists already" in capsys.readouterr().err
    odd = tiny_checkpoints.cached("llama", intermediate_size=40)
    assert run([*words, odd]) == REFUSED
    assert "are not a multiple of 32" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
