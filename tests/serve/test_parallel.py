"""Several processes generate the same tokens as one, and the failure of a process is reported completely."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

import http_server
from rank_cases import GREEDY, LONG, PLAIN, TIGHT, cancel_some, model_path, outputs, prompts
from runtime.distributed import group_runner
from runtime.errors import ConfigurationError, EngineFailure, WorkerFailed
from serve import Engine
from serve.server.app import build_app

FAMILIES = ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
SOON = ("qwen3_moe",)  # families in the default test run
SHAPES = ("gemma2", "llama", "qwen3_moe")  # windows, plain attention, norms of heads with experts
each_family = pytest.mark.parametrize(
    "family",
    [family if family in SOON else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
four_processes = pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.slow if family in SHAPES else pytest.mark.long) for family in FAMILIES],
)
ROOT = Path(__file__).parents[2]


async def check_same_tokens(family: str, **parallel: Any) -> None:
    """Check that tokens equal those of one process: at first, with cancelled requests, cached, with retractions."""
    async with Engine(model_path(family), **PLAIN) as engine:
        expected = await outputs(engine)
    async with Engine(model_path(family), **PLAIN, **TIGHT, **parallel) as engine:
        _, found = await asyncio.gather(cancel_some(engine), outputs(engine))
        assert found == expected
        assert await outputs(engine) == expected
        assert engine.status().num_retracted > 0
        answer = await engine.generate(input_ids=prompts()[6], sampling_params=GREEDY)
        assert answer["meta_info"]["cached_tokens"] > 0


@each_family
async def test_two_ranks_give_the_tokens_of_one(family: str):
    await check_same_tokens(family, tp_size=2)


@four_processes
async def test_four_ranks_share_two_kv_heads(family: str):
    await check_same_tokens(family, tp_size=4)


@each_family
async def test_two_stages_give_the_tokens_of_one(family: str):
    await check_same_tokens(family, pp_size=2)


@four_processes
async def test_two_stages_of_two_ranks(family: str):
    await check_same_tokens(family, pp_size=2, tp_size=2)


@pytest.mark.slow
async def test_three_stages_with_small_micro_batches():
    await check_same_tokens("llama", pp_size=3, max_micro_batch_size=5)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"tp_size": 2}, id="ranks"),
        pytest.param({"pp_size": 2}, id="stages"),
        pytest.param({"tp_size": 4}, id="four ranks", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "pp_size": 2}, id="stages of ranks", marks=pytest.mark.slow),
        pytest.param({"dp_size": 2}, id="copies", marks=pytest.mark.slow),
    ],
)
async def test_logprobs_and_penalties_are_those_of_one_process(parallel: dict[str, int]):
    async def ask(**parallel: Any) -> Any:
        async with Engine(model_path(), **PLAIN, chunked_prefill_size=16, **parallel) as engine:
            return await engine.generate(
                input_ids=prompts()[5],
                sampling_params={"max_new_tokens": 12, "seed": 3, "frequency_penalty": 0.5, "top_p": 0.9},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=2,
            )

    one, two = await ask(), await ask(**parallel)
    assert two["output_ids"] == one["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        found, expected = two["meta_info"][name], one["meta_info"][name]
        assert [entry[1] for entry in found] == [entry[1] for entry in expected]
        assert [entry[0] for entry in found[1:]] == pytest.approx([entry[0] for entry in expected[1:]], abs=1e-4)


def workers() -> list[psutil.Process]:
    """Return Penstock's worker processes. Other tests may have left browser processes."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "runtime.distributed.worker_process" in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


async def test_killed_worker_is_named_to_every_caller_and_nothing_is_left():
    engine = Engine(model_path(), **PLAIN, tp_size=2)
    await engine.start()
    [worker] = workers()
    calls = [asyncio.create_task(engine.generate(input_ids=[5, 6, i], sampling_params=LONG)) for i in (7, 8, 9)]
    pieces = engine.stream(input_ids=[1, 2], sampling_params=LONG)
    await anext(pieces)
    worker.kill()
    killed = time.monotonic()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(WorkerFailed):
        async for _ in pieces:
            pass
    assert time.monotonic() - killed < 2
    for error in errors:
        assert isinstance(error, WorkerFailed)
        assert "Rank 1" in error.message
        assert "SIGKILL" in error.message
    assert engine.status().state == "failed"
    with pytest.raises(EngineFailure, match="Rank 1"):
        await engine.wait()
    await engine.aclose()
    assert not workers()


async def test_health_turns_503_when_a_worker_is_killed():
    async with (
        Engine(model_path(), **PLAIN, tp_size=2) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        [worker] = workers()
        worker.kill()
        with anyio.fail_after(2):
            while (await client.get("/health")).status_code != 503:
                await asyncio.sleep(0.01)
        refused = await client.post("/generate", json={"input_ids": [5, 6, 7]})
        assert refused.status_code == 503


async def test_idle_engine_ends_when_a_worker_does():
    engine = Engine(model_path(), **PLAIN, tp_size=2)
    await engine.start()
    workers()[0].terminate()
    with pytest.raises(WorkerFailed, match=r"Rank 1 .* was killed by SIGTERM"):
        await engine.wait()
    await engine.aclose()


async def test_hanging_worker_is_found_by_the_watchdog(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_runner, "FINISH_S", 0.2)  # the step still hangs at the end
    engine = Engine(model_path(), **PLAIN, tp_size=2, watchdog_timeout=0.5)
    await engine.start()
    [worker] = workers()
    worker.suspend()
    with pytest.raises(EngineFailure, match="hangs"):
        await engine.generate(input_ids=[5, 6, 7], sampling_params=LONG)
    await engine.aclose()
    assert not workers()


async def test_cancelled_start_leaves_no_process():
    engine = Engine(model_path(), **PLAIN, tp_size=2)
    starting = asyncio.create_task(engine.start())
    while not workers():
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert not workers()


def test_heads_that_cannot_be_shared_are_refused():
    async def start() -> None:
        await Engine(model_path(), **PLAIN, tp_size=3).start()

    with pytest.raises(ConfigurationError, match="--tp-size 3 does not divide the model's 4 query heads"):
        asyncio.run(start())


SCRIPT = """
import asyncio, sys
from serve import SyncEngine
print("main is running", flush=True)
engine = SyncEngine(sys.argv[1], skip_tokenizer_init=True, tp_size=2)
engine.start()
print(engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 3})["output_ids"], flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
engine.close()
"""


def script(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """A script without a `__main__` guard, which must not run again in its workers."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(file), model_path(), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def test_script_without_a_guard_runs_once(tmp_path: Path):
    process = script(tmp_path, "end")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.count("main is running") == 1


def test_workers_die_with_a_killed_parent(tmp_path: Path):
    process = script(tmp_path, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "main is running\n"
    assert process.stdout.readline().startswith("[")
    [worker] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs([worker], timeout=2)
    assert not alive


@pytest.mark.slow
async def test_eight_starts_leave_nothing_behind():
    def held() -> tuple[int, int, int]:
        me = psutil.Process()
        return me.num_fds(), me.num_threads(), len(me.children())

    seen = []
    for _ in range(8):
        async with Engine(model_path(), **PLAIN, tp_size=2) as engine:
            await engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
        seen.append(held())
    assert seen[-1] == seen[1]


@pytest.mark.parametrize("family", FAMILIES)
async def test_two_copies_give_the_tokens_of_one(family: str):
    await check_same_tokens(family, dp_size=2, load_balance_method="longest_prefix")


async def test_copy_whose_worker_is_killed_is_started_again_and_the_others_go_on():
    async with Engine(model_path(), **PLAIN, dp_size=2, tp_size=2) as engine:
        expected = await outputs(engine)
        before = workers()
        assert len(before) == 2
        before[1].kill()
        assert await outputs(engine) == expected
        while len(workers()) < 2 or before[1] in workers():
            await asyncio.sleep(0.05)
        assert await outputs(engine) == expected
        assert engine.status().state == "ready"
    assert not workers()


@pytest.mark.slow
async def test_worker_killed_under_load_costs_what_ran_there_and_nothing_else():
    """Waiting requests are answered by the other replica. Failed requests get an error that does not mention ranks or
    processes.
    """
    bodies = [{"input_ids": [5, 6, 7 + i], "sampling_params": {**LONG, "max_new_tokens": 60}} for i in range(24)]
    options = {**PLAIN, "dp_size": 2, "tp_size": 2, "max_running_requests": 4}
    async with (
        Engine(model_path(), **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=300) as client,
    ):
        expected = [(await client.post("/generate", json=body)).json()["output_ids"] for body in bodies]
        asked = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
        while engine.status().num_running < 8:
            await asyncio.sleep(0)
        victim = workers()[1]
        waited = engine.status().num_waiting
        victim.kill()
        answers = await asyncio.gather(*asked)
        failed = [answer for answer in answers if answer.status_code != 200]
        assert len(failed) <= 24 - waited
        for answer in failed:
            assert answer.status_code == 500
            assert "A worker process that computed this request has ended" in answer.text
            assert "ank" not in answer.text
            assert str(victim.pid) not in answer.text
        for answer, ids in zip(answers, expected, strict=True):
            if answer.status_code == 200:
                assert answer.json()["output_ids"] == ids
        while len(engine.core.schedulers) < 2:
            await asyncio.sleep(0.05)
        assert engine.status().state == "ready"
