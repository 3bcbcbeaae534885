from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import scheduling_cost
from bench.__main__ import main
from bench.scheduling_cost import measure_scheduling
from bench.streaming_cost import MetricsCost, ScriptedRunner, StreamingCost, measure_streaming


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


def test_an_exceeded_budget_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["overhead", "scheduling", "--running", "4", "--steps", "10", "--check"]
    monkeypatch.setattr(scheduling_cost, "BUDGET_US", 1e9)
    assert main(command) == 0
    monkeypatch.setattr(scheduling_cost, "BUDGET_US", 0.0)
    assert main(command) == 1


def test_streams_come_back_whole_from_the_real_application() -> None:
    cost = measure_streaming(streams=3, output_tokens=20)
    assert (cost.tokens, cost.base_tokens) == (60, 48)
    assert 0 < cost.events <= 60
    assert cost.base_cpu_s > 0
    assert cost.duration_s >= 20 * 0.005


@pytest.mark.slow
def test_metrics_are_compared_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--streams", "2", "--tokens", "20", "--turns", "2", "--output-file", str(path)]
    assert main(["overhead", "metrics", *options]) == 0
    [cost] = json.loads(path.read_text())["results"]["metrics"]
    assert len(cost["off_us"]) == len(cost["on_us"]) == len(cost["more_us"]) == 2
    assert min(cost["off_us"] + cost["on_us"]) > 0


def test_the_middle_turn_says_what_metrics_add() -> None:
    cost = MetricsCost(2, 20, [20.0, 30.0, 25.0], [20.5, 40.0, 25.8], more_us=[0.5, 10.0, 0.8])
    assert cost.added_us == pytest.approx(0.8)
    assert cost.within_budget


def test_two_runs_tell_tokens_from_requests() -> None:
    cost = StreamingCost(
        streams=10,
        tokens=1000,
        events=1000,
        duration_s=1.0,
        cpu_s=0.025,  # 10 requests of 500 us, 1000 tokens of 20 us
        base_tokens=100,
        base_cpu_s=0.007,
    )
    assert cost.token_us == pytest.approx(20)
    assert cost.request_us == pytest.approx(500)
    assert cost.within_budget


def test_too_few_tokens_to_tell_are_refused() -> None:
    assert main(["overhead", "streaming", "--tokens", "16"]) == 2


async def test_a_scripted_device_takes_its_time_for_every_step() -> None:
    loop = asyncio.get_running_loop()
    runner, began_s = ScriptedRunner(0.01), loop.time()
    batch: Any = argparse.Namespace(sequences=(None,), sampling=None, number=0)
    first, second = runner.launch(batch), runner.launch(batch)
    await first
    await second
    assert loop.time() - began_s >= 0.02 - 0.001  # the loop's timers may be a millisecond early
