from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cpu import command
from bench.cpu.limits import Limits
from runtime.errors import ConfigurationError


def result(rate: float, engine: str, limits: Limits) -> dict[str, Any]:
    turn = {"engine": engine, "figure": "prefill 512", "round": 0, "value": rate, "others": 0.0}
    failure = {"engine": "vllm", "what": "start", "reason": "no memory"}
    part = {
        "shape": "S",
        "weights": "bf16",
        "turns": [turn],
        "failures": [failure],
        "versions": {engine: {f"{engine}-package": "1.2"}},
    }
    sitting = {"date": "2026-01-02T03:04:05", "machine": "A chip, 2 cores", "command": f"bench {engine}"}
    results = {"limits": limits._asdict(), "parts": [part], "sittings": [sitting]}
    return {"benchmark": "cpu", "results": results}


def written(tmp_path: Path, name: str, content: object) -> str:
    file = tmp_path / name
    file.write_text(json.dumps(content))
    return str(file)


def test_results_of_several_runs_are_joined_into_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = written(tmp_path, "a", result(3000.0, "ours", Limits(60e9, 1e12)))
    peer = written(tmp_path, "b", result(2000.0, "openvino", Limits(80e9, 0.9e12)))
    assert command.main(["--join", ours, peer]) == 0
    printed = capsys.readouterr().out
    assert "Measured 2026-01-02 on A chip, 2 cores: `bench openvino`" in printed
    assert "80.0 GB/s read, 1,000 GFLOP/s" in printed
    assert "| 1 | prefill 512, tok/s | 3,000 | **2,000** | 1.50 (1.50 to 1.50) |" in printed
    assert printed.count("vllm is missing from start on: no memory") == 1
    assert "ours-package 1.2, openvino-package 1.2" in printed


def test_joined_results_are_a_result_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = written(tmp_path, "a", result(3000.0, "ours", Limits(60e9, 1e12)))
    again = str(tmp_path / "again")
    command.main(["--join", ours, ours, "--output-file", again])
    first = capsys.readouterr().out
    command.main(["--join", again])
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("content", ["no JSON", json.dumps({"benchmark": "step"})])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"r\.json"):
        command.main(["--join", str(file)])


def test_a_peer_that_is_not_installed_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bench-cpu-peers vllm"):
        command.main(["--peers-only", "vllm", "--peers", str(tmp_path), "--models", str(tmp_path)])


def test_a_peer_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no peer numpy"):
        command.main(["--peers-only", "numpy", "--peers", str(tmp_path), "--models", str(tmp_path)])


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--rounds"):
        command.main(["--rounds", "0"])
