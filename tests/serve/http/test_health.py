"""`/health` depends on the step in flight, `/ready` on the next request. A hanging step leaves a record."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import http_server
import scripted_core
from runtime.actors import step_times, steps_in_flight
from runtime.actors.engine_core import EngineCore
from runtime.errors import EngineFailure
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.server.app import build_app

Running = tuple[EngineCore, scripted_core.ScriptedRunner, httpx.AsyncClient]


@asynccontextmanager
async def running(**schedule: Any) -> AsyncIterator[Running]:
    async with (
        scripted_core.running(**schedule) as (core, runner),
        http_server.serving(build_app(core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield core, runner, client


def request(new: int = 8, length: int = 3) -> Request:
    return Request(ids=tuple(range(3, 3 + length)), sampling=SamplingParams(max_new_tokens=new, seed=1))


async def until(state: Callable[[], bool]) -> None:
    while not state():
        await asyncio.sleep(0.001)


async def test_a_step_that_takes_too_long_is_seen_and_the_end_of_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_times, "LEAST_PATIENCE_S", 0.05)
    async with running() as (core, runner, http):
        await core.submit(request()).whole()  # measures steps of each kind
        runner.open.clear()
        asked = core.submit(request())
        await until(lambda: core.status().step_age_s > 0)
        await until(lambda: core.status().hangs)
        assert core.status().step_age_s > 0.05
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).status_code == 503
        runner.open.set()
        await asked.whole()
        assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200


async def test_a_process_that_stood_still_is_not_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "LEAST_PATIENCE_S", 0.25)
    monkeypatch.setattr(steps_in_flight, "WATCHDOG_PERIOD_S", 0.02)
    monkeypatch.setattr(steps_in_flight, "STALL_S", 0.1)
    async with running() as (core, runner, http):
        await core.submit(request()).whole()
        runner.open.clear()
        asked = core.submit(request())
        await until(lambda: core.status().step_age_s > 0)
        await asyncio.sleep(0.05)  # the watchdog is waiting now
        time.sleep(0.6)
        assert (await http.get("/health")).status_code == 200
        await until(lambda: core.status().hangs)
        runner.open.set()
        await asked.whole()


async def test_the_first_step_of_a_kind_may_take_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "LEAST_PATIENCE_S", 0.0)
    async with running() as (core, runner, http):
        runner.open.clear()
        asked = core.submit(request())
        await until(lambda: core.status().step_age_s > 0.02)
        assert core.status().predicted_step_s is None
        assert (await http.get("/health")).status_code == 200
        runner.open.set()
        await asked.whole()


def test_long_prompts_are_expected_to_take_long() -> None:
    times = step_times.StepTimes()
    drive = _drive()
    prompt, decode = drive(40), drive(0)
    assert times.predicted_s(prompt) is times.predicted_s(decode) is None
    assert times.patience_s(prompt, 300.0) == 300.0
    times.note(decode, 0.01)
    times.note(drive(10), 0.11)
    assert times.predicted_s(decode) == pytest.approx(0.01)
    assert times.predicted_s(prompt) == pytest.approx(0.41)
    assert times.patience_s(decode, 300.0) == step_times.LEAST_PATIENCE_S
    assert times.patience_s(drive(4000), 300.0) == pytest.approx(10 * 40.01)


def test_enough_prompt_tokens_for_a_step_follow_what_steps_take() -> None:
    times, drive = step_times.StepTimes(), _drive()
    least = step_times.MIN_PROMPT_TOKENS

    def enough() -> tuple[int, int]:
        return times.prompt_limits or (0, 0)

    assert enough() == (0, 0)
    times.note(drive(0), 0.01)
    times.note(drive(100), 0.11)  # a millisecond per token
    assert enough() == (least, least)
    times.note(drive(1000), 0.02)  # much less per token
    alone, beside = enough()
    assert alone > beside >= least  # with running streams the steps are shorter
    times.note(drive(0), 3.0)  # the process was stopped
    assert enough()[0] < 9 * alone


def test_scored_tokens_of_a_step_follow_what_they_take_and_not_what_others_take() -> None:
    times, drive = step_times.StepTimes(), _drive()
    assert times.scored_limits is None
    times.note(drive(0), 0.01)
    times.note(drive(1000), 0.02)
    plain = times.prompt_limits
    times.note(drive(1000, 1000), 0.12)  # 0.1 ms for the log-probabilities of each token
    assert times.scored_limits == (2000, 200)
    assert times.prompt_limits == plain
    assert times.predicted_s(drive(1000, 1000)) == pytest.approx(0.12)
    times.note(drive(100, 100), 10.0)
    assert times.scored_limits is not None
    assert times.scored_limits < (2000, 200)


def _drive() -> Callable[..., Any]:
    from types import SimpleNamespace

    def batch(tokens: int, num_scored: int = 0) -> Any:
        return SimpleNamespace(stats=SimpleNamespace(num_prompt_tokens=tokens, num_scored=num_scored))

    return batch


async def test_ready_is_about_the_next_request() -> None:
    async with running(max_queued=2) as (core, runner, http):
        before = (await http.get("/ready")).json()
        assert before == {
            "ready": True,
            "state": "ready",
            "estimated_wait_s": 0.0,
            "num_waiting": 0,
            "room": 10,
        }
        runner.open.clear()
        asked = [core.submit(request()) for _ in range(scripted_core.NUM_SEQUENCES)]
        await until(lambda: core.status().num_running == scripted_core.NUM_SEQUENCES)
        asked += [core.submit(request()) for _ in range(2)]
        await until(lambda: core.status().queue_space == 0)
        full = await http.get("/ready")
        assert (full.status_code, full.json()["ready"], full.json()["room"]) == (503, False, 0)
        assert int(full.headers["retry-after"]) >= 1
        assert (await http.get("/health")).status_code == 200  # a busy engine is healthy
        runner.open.set()
        for output in asked:
            await output.whole()
        assert (await http.get("/ready")).status_code == 200


async def test_the_watchdog_leaves_a_record_without_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "crashes"
    async with running(watchdog_timeout_s=0.05, crash_folder=str(folder)) as (core, runner, http):
        runner.open.clear()
        asked = core.submit(Request(ids=(301, 302), sampling=SamplingParams(max_new_tokens=8), label="Anna"))
        with pytest.raises(EngineFailure, match="hangs"):
            await asked.whole()
        assert (await http.get("/health")).status_code == 503
    [file] = folder.iterdir()
    record = json.loads(file.read_text())
    assert "--watchdog-timeout" in record["reason"]
    assert record["steps_in_flight"][0]["tokens"] == 2
    assert record["requests"][0]["sequences"][0]["prompt"] == 2
    assert any("MainThread" in name for name in record["threads"])
    assert record["tasks"]
    assert "Anna" not in file.read_text()
    [found] = record["requests"]
    numbers = {key: value for key, value in found.items() if key not in ("id", "age_s")}
    assert "301" not in json.dumps(numbers)
    assert "Thread MainThread" in caplog.text


async def test_a_folder_that_cannot_be_written_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    async with running(watchdog_timeout_s=0.05, crash_folder=str(tmp_path / "file" / "x")) as (
        core,
        runner,
        _,
    ):
        runner.open.clear()
        with pytest.raises(EngineFailure, match="hangs"):
            await core.submit(request()).whole()
    assert "cannot be written" in caplog.text
