"""The launch commands of SGLang's documentation are understood, and its defaults are accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ops.machine import Machine
from runtime.config import Args, options
from runtime.config.resolve import ANY_MODEL, decide, resolve

CPU = replace(Machine.named("cpu"), compiler="/usr/bin/c++")
ONE_GPU = Machine.named("h200")
MACHINES = {
    "cpu": CPU,
    "h200": ONE_GPU,
    "eight of b200": replace(Machine.named("b200"), gpus=Machine.named("b200").gpus * 8),
}
LINES = [
    line
    for line in Path(__file__).with_name("launch_set.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
FILE = """
model-path: MODEL
host: 0.0.0.0
port: 30001
tensor-parallel-size: 2
enable-metrics: true
log-requests: true
"""
# Defaults of SGLang that a script may set explicitly.
DEFAULTS = [
    "--base-gpu-id 0",
    "--gpu-id-step 1",
    "--triton-attention-num-kv-splits 8",
    "--torch-compile-max-bs 32",
    "--nnodes 1 --node-rank 0 --dist-init-addr here:5000",
    "--load-format auto --dtype auto --kv-cache-dtype auto",
    "--max-prefill-tokens 16384 --schedule-policy fcfs --schedule-conservativeness 1.0",
    "--watchdog-timeout 300 --log-level INFO --log-requests-level 2",
    "--disaggregation-mode null --moe-a2a-backend none --lora-backend triton",
    "--speculative-attention-mode prefill --stream-interval 1 --page-size 1",
    "--max-queued-requests 9223372036854775807",
]


def words_of(line: str, folder: Path) -> list[str]:
    (folder / "config.yaml").write_text(FILE)
    (folder / "chat.jinja").write_text("{{ messages }}")
    filled = line.replace("CONFIG", str(folder / "config.yaml")).replace("FILE", str(folder / "chat.jinja"))
    return filled.removeprefix("works ").split()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("line", LINES)
def test_line_is_done_or_refused_under_the_name_of_what_it_says(line: str, machine: str, tmp_path: Path) -> None:
    args = Args.parse(words_of(line, tmp_path))
    _, builder = decide(args, MACHINES[machine], ANY_MODEL)
    assert builder.refusals.keys() <= args.explicitly_set
    flags = {option.name: option.flags for option in options()}
    for name, sentence in builder.refusals.items():
        assert sentence.startswith(flags[name]), sentence
        assert sentence.endswith(".")
    if line.startswith("works ") and machine == "cpu":
        assert builder.refusals == {}


def test_what_the_command_line_says_wins_over_the_file(tmp_path: Path) -> None:
    plan = resolve(Args.parse([*words_of("--config CONFIG", tmp_path), "--port", "5", "--tp", "4"]), CPU, ANY_MODEL)
    assert (plan.serve.host, plan.serve.port, plan.parallel.tp_size) == ("0.0.0.0", 5, 4)
    assert (plan.observe.metrics, plan.observe.request_log_level) == (True, 2)


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize("line", DEFAULTS)
def test_default_of_the_original_is_not_refused(line: str, machine: str) -> None:
    _, builder = decide(Args.parse(["--model-path", "MODEL", *line.split()]), MACHINES[machine], ANY_MODEL)
    assert builder.refusals == {}
