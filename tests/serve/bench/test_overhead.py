from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.bench.__main__ import main
from serve.bench.scheduling_cost import measure_scheduling


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_step_is_timed_with_everybody_running(page_size: int) -> None:
    cost = measure_scheduling(running=8, page_size=page_size, steps=40)
    assert (cost.running, cost.page_size, cost.steps) == (8, page_size, 40)
    assert 0 < cost.fill_us.min <= cost.fill_us.median <= cost.fill_us.p99
    assert cost.step_us.min >= cost.fill_us.min + cost.apply_us.min


def test_result_file_holds_the_distributions(tmp_path: Path, capsys) -> None:
    path = tmp_path / "r.json"
    command = ["overhead", "scheduling", "--running", "4", "--steps", "10", "--output-file", str(path)]
    assert main(command) == 0
    figures = json.loads(path.read_text())["results"]["scheduling"]
    assert [cost["page_size"] for cost in figures] == [1, 16]
    assert figures[0]["step_us"]["median"] > 0
    assert "budget" in capsys.readouterr().out
