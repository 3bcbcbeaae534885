"""The documentation's table of kernels agrees with `penstock explain --machine ...`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.machine import KNOWN_GPUS
from serve.cli import explain

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
    machine: str, option: str, backend: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, done = asked(capsys, "--machine", machine, option, backend)
    _, by_itself = asked(capsys, "--machine", machine, "--all")
    if word == "refused":
        assert (status, done[option]) == (2, "refused")
    else:
        assert (status, done[option]) == (0, backend)
    assert (by_itself[option] == backend) == (word == "default")
