"""The documentation's table of kernels agrees with `penstock explain --machine ...`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.machine import KNOWN_GPUS
from serve.cli import explain

MLA = {  # a model with latent attention; `cutlass_mla`, `flashmla` and `trtllm_mla` compute nothing else
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LINES = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8").splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`*") for cell in line.strip("|").split("|")]


def documented() -> list[tuple[str, str, str, str]]:
    """Return (machine, option, backend, word) of every cell."""
    [first] = [number for number, line in enumerate(LINES) if line.startswith("| option | backend |")]
    machines = cells(LINES[first])[2:]
    table: list[tuple[str, str, str, str]] = []
    for line in LINES[first + 2 :]:
        if not line.startswith("|"):
            break
        option, backend, *words = cells(line)
        table += [(name, option, backend, word) for name, word in zip(machines, words, strict=True)]
    return table


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """Return the exit status, and the decision about each option."""
    status = explain.main(["--json", *words])
    return status, {row["option"]: row["done"] for row in json.loads(capsys.readouterr().out)["options"]}


def test_every_machine_that_can_be_named_is_in_the_table() -> None:
    assert {machine for machine, *_ in documented()} == {"cpu", *KNOWN_GPUS}


@pytest.mark.parametrize(("machine", "option", "backend", "word"), documented())
def test_explain_answers_as_documented(
    machine: str, option: str, backend: str, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model: list[str] = []
    if backend.endswith("mla"):
        (tmp_path / "config.json").write_text(json.dumps(MLA))
        model = ["--model-path", str(tmp_path)]
    status, done = asked(capsys, "--machine", machine, option, backend, *model)
    _, by_itself = asked(capsys, "--machine", machine, "--all", *model)
    if word == "refused":
        assert (status, done[option]) == (2, "refused")
    else:
        assert (status, done[option]) == (0, backend)
    assert (by_itself[option] == backend) == (word == "default")
