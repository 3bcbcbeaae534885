"""Tests of `gpu-contact` without a GPU. The complete rehearsal is a slow test."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from itertools import count
from pathlib import Path
from random import Random
from zipfile import ZipFile

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.__main__ import main
from bench.contact import bundle, command, failed_capture, trace
from bench.contact.report import Report
from bench.contact.stages import KEPT_S, Stage, stages
from fake_device import LateDevice
from runtime.errors import EngineFailure


def run(stage: Stage, tmp_path: Path, budget_s: float = 60, monkeypatch: pytest.MonkeyPatch | None = None) -> dict:
    contact = command._Contact("cpu", tmp_path / "out", command.monotonic() + budget_s)
    return contact.run(stage)


def stage(*words: str, kind: str = "command", **more: float) -> Stage:
    return Stage(name="one", kind=kind, words=words, limit_s=more.pop("limit_s", 60), **more)  # pyright: ignore


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(1)", "passed"),
        ("raise SystemExit(1)", "failed"),
        ("print('needs it'); raise SystemExit(2)", "refused"),
    ],
)
def test_a_command_ends_in_one_of_three_ways(code: str, status: str, tmp_path: Path) -> None:
    assert run(stage("-c", code), tmp_path)["status"] == status


def test_a_hang_costs_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    found = run(stage("-c", "import time; print('here', flush=True); time.sleep(60)", limit_s=2), tmp_path)
    assert found["status"] == "timed out"
    assert "here" in found["output"]


def test_a_spent_budget_is_said(tmp_path: Path) -> None:
    assert run(stage("-c", "print(1)"), tmp_path, budget_s=1)["status"] == "not reached"


def test_a_hang_leaves_the_time_that_later_stages_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    contact = command._Contact("cpu", tmp_path / "out", command.monotonic() + 62)
    found = contact.run(stage("-c", "import time; time.sleep(60)"), kept_s=60)
    assert found["status"] == "timed out"
    assert contact.run(stage("-c", "print(1)"))["status"] == "passed"


def test_the_times_that_stages_need_fit_nine_minutes() -> None:
    found = {one.name: one for one in stages("cuda")}
    assert set(KEPT_S) <= set(found)
    assert sum(one.kept_s for one in found.values()) <= 540
    assert all(one.kept_s <= one.limit_s for one in found.values())


def test_memory_that_failed_captures_keep_is_a_fault() -> None:
    device, used = LateDevice(Random(0), haste=1.0), count()
    with torch.inference_mode():
        rows, faults = failed_capture.watched(device, 8)
        assert not faults
        _, faults = failed_capture.watched(device, 8, lambda: failed_capture.Memory(next(used), 0))
        assert len(faults) == 2
        _, faults = failed_capture.watched(device, 8, lambda: failed_capture.Memory(0, 2048 * next(used)))
    assert len(faults) == 3
    assert len(rows) == 5


def test_a_trace_without_a_replay_is_refused() -> None:
    events = [{"cat": "kernel", "name": "product", "dur": 2.0}, {"cat": "kernel", "name": "product", "dur": 3.0}]
    with pytest.raises(EngineFailure, match="0 replays"):
        trace.kernel_rows(events, "tiny", on_gpu=True)
    rows = trace.kernel_rows([*events, {"name": "cudaGraphLaunch"}], "tiny", on_gpu=True)
    assert [row.value for row in rows] == [5.0, 5.0]
    assert "2 x product" in rows[1].what


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_first(): pass
def test_dies(): os._exit(139)
def test_loses_the_gpu(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_hangs(): time.sleep(100)
def test_wrong(): assert 1 == 2
def test_last(): pass
"""


def test_a_crash_a_hang_and_a_lost_gpu_cost_one_test_each(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    words = (str(file), "-c", str(command.ROOT / "pyproject.toml"), "--rootdir", str(tmp_path))
    found = run(stage(*words, kind="tests", test_limit_s=2), tmp_path)
    outcomes = {line["test"].rpartition("::")[2]: line["outcome"] for line in found["failures"]}
    assert outcomes == {
        "test_dies": "crashed",
        "test_loses_the_gpu": "failed",
        "test_hangs": "crashed",
        "test_wrong": "failed",
    }
    assert found["tests"]["passed"] == 2
    assert found["status"] == "failed"


def test_what_was_known_is_kept_and_not_repeated(tmp_path: Path) -> None:
    known = Report(tmp_path, "cpu", 10)
    known.add({"name": "environment", "status": "passed", "seconds": 1.0, "note": "", "output": ""})
    known.add({"name": "figures: decode", "status": "failed", "seconds": 1.0, "note": "", "output": "why"})
    before = json.loads((tmp_path / "contact.json").read_text())
    later = Report(tmp_path / "later", "cpu", 10, before)
    assert later.done("environment")
    assert not later.done("figures: decode")
    assert "why" in (tmp_path / "contact.md").read_text()


def test_every_test_file_and_every_row_is_a_stage() -> None:
    from bench.gpu.command import ROWS

    words = [word for one in stages("cuda") for word in one.words]
    # all GPU tests except those of the bench rows
    files = {path.name for path in (command.ROOT / "tests/gpu").glob("test_*.py")} - {"test_bench.py"}
    assert {Path(word).name for word in words if word.startswith("tests/gpu")} == files
    assert set(ROWS) <= set(words)
    assert [one.name for one in stages("cpu")] == [one.name for one in stages("cuda")]


def wheel(folder: Path, name: str, *needs: str) -> Path:
    path = folder / name
    with ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr("some-1.0.dist-info/METADATA", "\n".join(lines))
    return path


def test_wheels_that_would_not_work_there_are_named(tmp_path: Path) -> None:
    good = wheel(tmp_path, "some-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", "torch", "nothing; extra == 'x'")
    older = wheel(tmp_path, "other-1.0-cp311-cp311-manylinux_2_17_x86_64.whl")
    needy = wheel(tmp_path, "third-1.0-py3-none-any.whl", "some>=1", "absent>=2")
    assert bundle.check([good]) == []
    problems = bundle.check([good, older, needy])
    assert len(problems) == 2
    assert "other-1.0" in problems[0]
    assert "absent" in problems[1]
    assert bundle.lock([good]) == ["some==1.0"]


def test_the_bundle_has_what_we_need_there() -> None:
    """The bundle has Penstock's dependencies and the imports of GPU tests, as far as the machine lacks them."""
    carried = {canonicalize_name(Requirement(need).name) for need in bundle.wanted()}
    own = tomllib.loads((command.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(need).name) for need in own} <= carried | bundle.THERE
    tests = command.ROOT / "tests"
    files = [tests / "conftest.py", *(tests / "gpu").glob("*.py"), *(tests / "on_device").glob("*.py")]
    found = {name for file in files for name in imported(file)}
    ours = {path.stem for folder in (tests, tests / "kit", command.ROOT) for path in folder.iterdir()}
    assert "hypothesis" in found
    assert found - ours - sys.stdlib_module_names <= carried | bundle.THERE


def imported(file: Path) -> set[str]:
    """Return the top-level names that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_only_some_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpu-contact", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*words, "--stages", "environment", "figures: decode"]) == 0
    assert "one request decodes" in capsys.readouterr().out
    assert main(["gpu-contact", "--report", str(tmp_path / "contact.json")]) == 0
    assert "figures: decode | measured" in capsys.readouterr().out
    assert main([*words, "--stages", "no such"]) == 2
    assert main([*words[:1], "--device", "tpu"]) == 2


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.slow), pytest.param(["--every"], marks=pytest.mark.long)]
)
def test_the_rehearsal_passes(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpu-contact", "--device", "cpu", "--output", str(tmp_path), "--budget", "1700"]
    status = main([*words, *options])
    sys.stdout.write(capsys.readouterr().out)
    assert status == 0, (tmp_path / "contact.md").read_text()[:4000]
