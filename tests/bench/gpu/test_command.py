"""The command from end to end on a CPU with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.gpu import command
from ops.machine import Machine
from runtime.errors import StepFailed

TRY = ["gpu", "--device", "cpu", "--shape", "tiny"]


def lines(printed: str) -> list[list[str]]:
    """Return the cells of the last table."""
    table = printed.rpartition("|---|---|---|---|---|---|")[2]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def test_offline_rows_are_printed_beside_their_limits(tmp_path: Path, capsys) -> None:
    file = tmp_path / "r.json"
    rows = ["--rows", "decode", "offline", "mixed", "prefix"]
    assert main([*TRY, *rows, "--output-file", str(file), "--page-size", "16"]) == 0
    printed = capsys.readouterr().out
    assert "say nothing about a GPU" in printed
    assert "GB/s" in printed
    assert [cells[1] for cells in lines(printed)] == ["tiny"] * 5
    content = json.loads(file.read_text())
    assert content["settings"]["engine"] == ["--page-size", "16"]
    measured = content["results"]["rows"]
    assert all(row["value"] > 0 for row in measured)
    assert all(0 < row["share"] <= 1 for row in measured)
    cached = measured[-1]
    assert (cached["unit"], cached["value"], cached["limit"]) == ("%", 40.0, 40.0)


@pytest.mark.slow
def test_online_rows_are_measured_over_http(capsys) -> None:
    assert main([*TRY, "--rows", "online", "occupancy", "launch"]) == 0
    found = lines(capsys.readouterr().out)
    assert [cells[0].rpartition(", ")[2] for cells in found[8:11]] == ["mean", "p10", "p90"]
    assert all(cells[2].endswith("ms") for cells in found[:8])
    assert all(0 < float(cells[2].split()[0]) <= 100 for cells in found[8:11])
    # Steps without a prompt, with a prompt and the default graphs, and with a prompt and no graphs of prompts.
    assert [cells[0].rpartition(": ")[2] for cells in found[11:]] == [
        "a step",
        "launching it, of its time",
    ] * 3
    assert all(float(cells[2].split()[0]) > 0 for cells in found[11:])


@pytest.mark.slow
def test_a_cold_server_is_timed_twice_to_its_first_token(capsys) -> None:
    assert main([*TRY, "--rows", "cold"]) == 0
    found = lines(capsys.readouterr().out)
    assert [cells[0].rpartition(", ")[2] for cells in found] == [
        "nothing compiled before",
        "kernels compiled before",
    ]
    assert all(0 < float(cells[2].split()[0]) < 60 for cells in found)


@pytest.mark.slow
def test_a_server_that_does_not_start_is_a_row_with_its_last_words(capsys) -> None:
    assert main([*TRY, "--rows", "cold", "--mem-fraction-static", "0.0000001"]) == 1
    assert "ended before its first token" in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_that_fails_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def lost(bench: object) -> list:
        raise ExceptionGroup("tasks", [StepFailed("the step is lost")])

    monkeypatch.setattr(command, "ROWS", {**command.ROWS, "offline": lost})
    assert main([*TRY, "--rows", "offline", "decode"]) == 1
    first, second = lines(capsys.readouterr().out)
    assert first[2] == "not measured: the step is lost"
    assert second[2].endswith("tokens/s")


def test_a_mistake_of_ours_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(bench: object) -> list:
        raise ExceptionGroup("tasks", [KeyError("ours")])

    monkeypatch.setattr(command, "ROWS", {**command.ROWS, "decode": wrong})
    with pytest.raises(ExceptionGroup):
        main([*TRY, "--rows", "decode"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["gpu"], "has no NVIDIA GPU"),
        (["gpu", "--device", "cuda:1", "--shape", "tiny"], "has no NVIDIA GPU"),
        (["gpu", "--device", "tpu"], "neither cuda nor cpu"),
        ([*TRY, "--no-such-option"], "no-such-option"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(Machine, "probe", lambda: Machine.named("cpu"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert why in captured.err
    assert not captured.out
