"""Logs of requests, written through the real actors."""

from __future__ import annotations

import gc
import json
import logging
import re

import pytest

import scripted_core
from runtime.actors import request_observers
from runtime.config.plan import ObservePlan
from runtime.errors import StepFailed
from runtime.request import Request
from runtime.sampling_params import SamplingParams

LINE = re.compile(r"(Receive|Finish): obj=(\{.*?\})(?:, out=(\{.*\}))?$")


LABEL = 'a"\nFinish: obj={}'


async def logged(
    caplog: pytest.LogCaptureFixture,
    plan: ObservePlan,
    *,
    ids: tuple[int, ...] = (3, 4, 5),
    fails: bool = False,
) -> list[str]:
    """Return the messages about one request."""
    sampling = SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)
    with caplog.at_level(logging.INFO, "penstock.requests"):
        async with scripted_core.running(observe=plan) as (core, runner):
            output = core.submit(Request(ids=ids, sampling=sampling, label=LABEL))
            if fails:
                runner.poison = {LABEL}
                with pytest.raises(StepFailed):
                    await output.whole()
            else:
                await output.whole()
    return [record.getMessage() for record in caplog.records if record.name == "penstock.requests"]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
async def test_each_level_says_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setattr(request_observers, "SHORT_CHARS", 50)
    ids = tuple(range(3, 103))
    first, last = await logged(caplog, ObservePlan(request_log_level=level), ids=ids)
    assert "\n" not in first + last
    received, finished = LINE.match(first), LINE.match(last)
    assert received
    assert finished
    asked, out = json.loads(received[2]), json.loads(finished[3])
    assert asked["rid"] == LABEL
    assert ("sampling_params" in asked) == (level >= 1)
    if level >= 1:
        assert asked["sampling_params"] == {"max_new_tokens": 4, "seed": 1, "ignore_eos": True}
    assert asked.get("input_ids") == {2: list(ids[:50]), 3: list(ids)}.get(level)
    [choice] = out["choices"]
    assert (choice["finish_reason"], choice["prompt"], choice["output"]) == ("length", 100, 4)
    assert ("text" in choice) == (level >= 2)


async def test_failed_request_is_logged_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    _, last = await logged(caplog, ObservePlan(request_log_level=2), fails=True)
    finished = LINE.match(last)
    assert finished
    assert json.loads(finished[3])["error"] == "StepFailed"


async def test_time_stats_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    [line] = await logged(caplog, ObservePlan(log_request_times=True))
    found = re.fullmatch(
        r"Req Time Stats\(rid=.*, input len=3, output len=4, type=unified\): "
        r"queue_duration=([\d.]+)ms, forward_duration=([\d.]+)ms, start_time=[\d.]+",
        line,
    )
    assert found
    assert float(found[2]) > 0


async def test_nothing_is_logged_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    assert await logged(caplog, ObservePlan()) == []


async def test_long_collections_are_logged_and_the_hook_goes_with_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = list(gc.callbacks)
    async with scripted_core.running(observe=ObservePlan(collector_warning_s=1e-9)):
        assert len(gc.callbacks) == len(before) + 1
        with caplog.at_level(logging.WARNING, "penstock.core"):
            gc.collect()
    assert gc.callbacks == before
    assert "Garbage collection of generation 2 took" in caplog.text
