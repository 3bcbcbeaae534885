"""Pausing generation, and giving the memory of weights and cache back while the server runs."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_checkpoints
from runtime.errors import InvalidRequest
from serve import Engine, SyncEngine
from trainer_process import tensors_of
from weights_server import GREEDY, PLAIN, PROMPT, checkpoint, greedy, ids, post, scores, serving

LONG = {**GREEDY, "max_new_tokens": 300}


async def generate(http: httpx.AsyncClient, sampling: dict[str, Any] = LONG) -> dict[str, Any]:
    return await post(http, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})


async def until_running(engine: Engine, task: asyncio.Task[Any]) -> None:
    while not engine.status().num_running:
        if task.done():
            raise AssertionError(f"the request ended early: {task.result()}")
        await asyncio.sleep(0)


async def no_step_runs(engine: Engine) -> None:
    """Fail if a step runs within many turns of the event loop."""
    before = engine.status().num_steps
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert engine.status().num_steps == before


# --- pause ---


@pytest.mark.parametrize("route", ["/pause_generation", "/pause?mode=keep"])
async def test_requests_stay_in_place(route: str) -> None:
    async with serving(checkpoint(0)) as (engine, http):
        alone = (await generate(http))["output_ids"]
        running = asyncio.create_task(generate(http))
        await until_running(engine, running)
        await post(http, route, {"mode": "in_place"})
        used = engine.status().num_used_pages
        assert used
        late = asyncio.create_task(ids(http))
        await no_step_runs(engine)
        assert engine.status().num_used_pages == used
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.get("/health_generate")).status_code == 200
        await post(http, "/continue_generation")
        assert (await running)["output_ids"] == alone
        assert await late == greedy(checkpoint(0))
        engine.core.check()


async def test_retracted_requests_free_their_memory() -> None:
    async with serving(checkpoint(0)) as (engine, http):
        alone = (await generate(http))["output_ids"]
        running = asyncio.create_task(generate(http))
        await until_running(engine, running)
        await post(http, "/pause_generation", {"mode": "retract"})
        assert (engine.status().num_used_pages, engine.status().num_cached_pages) == (0, 0)
        await post(http, "/flush_cache")
        await post(http, "/continue_generation")
        assert (await running)["output_ids"] == alone
        engine.core.check()


async def test_a_pause_may_abort_or_wait() -> None:
    async with serving(checkpoint(0)) as (engine, http):
        alone = (await generate(http))["output_ids"]
        running = asyncio.create_task(generate(http))
        await until_running(engine, running)
        await post(http, "/pause_generation")
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        await post(http, "/flush_cache")
        await post(http, "/resume")
        running = asyncio.create_task(generate(http))
        await until_running(engine, running)
        pausing = asyncio.create_task(post(http, "/pause?mode=wait"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(ids(http))
        assert (await running)["output_ids"] == alone
        await pausing
        await no_step_runs(engine)
        await post(http, "/resume")
        assert await late == greedy(checkpoint(0))
        await post(http, "/pause?mode=stop", status=400)
        await post(http, "/pause_generation", {"mode": "wait"}, status=400)
        engine.core.check()


async def test_a_closed_engine_ends_paused_requests() -> None:
    async with Engine(checkpoint(0), **PLAIN) as engine:
        running = asyncio.create_task(engine.generate(input_ids=PROMPT, sampling_params=LONG))
        await until_running(engine, running)
        await engine.pause_generation("in_place")
        draining = asyncio.create_task(engine.core.drain())
        assert len((await running)["output_ids"]) == 300
        await draining


async def test_steps_can_be_slowed_down() -> None:
    async with serving(checkpoint(0)) as (engine, http):
        await post(http, "/slow_down", {"forward_sleep_time": 0.02})
        began = asyncio.get_running_loop().time()
        assert await ids(http) == greedy(checkpoint(0))
        assert asyncio.get_running_loop().time() - began > 10 * 0.02
        await post(http, "/slow_down", {"forward_sleep_time": None})
        assert all(scheduler.delay_s == 0 for scheduler in engine.core.schedulers)


async def test_the_request_log_changes_while_the_server_runs(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(checkpoint(0)) as (_, http):
        with caplog.at_level("INFO", "penstock.requests"):
            await ids(http)
            assert not caplog.messages
            now = await post(http, "/configure_logging", {"log_requests": True, "log_requests_level": 3})
            assert now == {"log_requests": True, "log_requests_level": 3}
            await ids(http)
            [begin, end] = caplog.messages
            assert begin.startswith("Receive")
            assert str(PROMPT[0]) in begin
            assert end.startswith("Finish")
            assert await post(http, "/configure_logging", {"log_requests_level": 0})
            await ids(http)
            assert "input_ids" not in caplog.messages[2]
            off = await post(http, "/configure_logging", {"log_requests": False})
            assert off == {"log_requests": False, "log_requests_level": None}
            await ids(http)
            assert len(caplog.messages) == 4
            for wrong in ({"log_requests_level": 3}, {"log_requests_level": 9}, {"log_requests": "yes"}):
                assert (await http.post("/configure_logging", json=wrong)).status_code == 400


# --- sleep ---


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


BIG = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 60_000,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.slow
@pytest.mark.parametrize("from_trainer", [False, True], ids=["files", "trainer"])
async def test_sleep_gives_memory_back_and_waking_restores_everything(from_trainer: bool) -> None:
    path = tiny_checkpoints.cached("llama", seed=0, **BIG)
    async with serving(path, max_total_tokens=4096) as (engine, http):
        if from_trainer:
            tensors = tensors_of(path)
            await engine.update_weights_from_tensor({name: tensor * 1.5 for name, tensor in tensors.items()})
            del tensors
        want = await scores(engine)
        num_bytes = sum(t.nbytes for t in engine.core.schedulers[0].runner._executor._model.parameters())  # type: ignore[attr-defined]
        running = asyncio.create_task(generate(http))
        await until_running(engine, running)
        before = resident_bytes()
        assert await engine.core.weights.release(("weights", "kv_cache")) >= 0.95 * num_bytes
        assert before - resident_bytes() >= 0.95 * num_bytes
        late = asyncio.create_task(ids(http))
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        await no_step_runs(engine)
        await post(http, "/update_weights_from_disk", {"model_path": path}, status=400)
        await post(http, "/resume_memory_occupation", {"tags": ["weights"]})
        await no_step_runs(engine)
        await post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert len((await running)["output_ids"]) == 300
        assert len(await late) == 10
        assert await scores(engine) == want
        engine.core.check()


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp_size": 2}, marks=pytest.mark.slow)], ids=["alone", "tp"])
async def test_vllms_sleep_levels(sizes: dict[str, int]) -> None:
    old = checkpoint(0)
    async with serving(old, **sizes) as (engine, http):
        tensors = tensors_of(checkpoint(1))
        await engine.update_weights_from_tensor(tensors)
        want = await scores(engine)
        await post(http, "/sleep?level=1")
        await post(http, "/wake_up")
        assert await scores(engine) == want
        await post(http, "/sleep?level=2")
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        await post(http, "/wake_up?tags=weights")
        late = asyncio.create_task(ids(http))
        await post(http, "/wake_up?tags=kv_cache")
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        await no_step_runs(engine)  # the weights were discarded
        some = dict(list(tensors.items())[:5])
        await engine.update_weights_from_tensor(some)
        await no_step_runs(engine)
        await engine.update_weights_from_tensor(tensors)
        assert await late == greedy(checkpoint(1))
        assert await scores(engine) == want
        await post(http, "/sleep?level=3", status=400)
        await post(http, "/release_memory_occupation", {"tags": ["all"]}, status=400)
        engine.core.check()


async def test_a_second_release_and_resume_do_nothing() -> None:
    async with serving(checkpoint(0)) as (engine, http):
        for _ in range(2):
            await post(http, "/release_memory_occupation")
        for _ in range(2):
            await post(http, "/resume_memory_occupation")
        assert await ids(http) == greedy(checkpoint(0))
        assert not engine.core.weights.released
        with pytest.raises(InvalidRequest, match="mode must be"):
            await engine.pause_generation("stop")


def test_scripts_sleep_too() -> None:
    with SyncEngine(checkpoint(0), **PLAIN) as engine:
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        engine.pause_generation("retract")
        engine.continue_generation()
        assert engine.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"] == greedy(checkpoint(0))
