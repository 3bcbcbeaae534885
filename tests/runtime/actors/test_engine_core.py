from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest

import fake_runner
import scripted_core
from runtime.actors import scheduler, tokenizer
from runtime.actors.engine_core import EngineCore, _failure
from runtime.actors.output_stream import OutputStream, read_all
from runtime.actors.step_times import QueueRate
from runtime.errors import EngineClosed, EngineFailure, InvalidRequest, OutOfMemory, Overloaded, StepFailed
from runtime.request import Finish, Request
from runtime.sampling_params import SamplingParams


def request(*ids: int, new: int = 8, seed: int = 1, n: int = 1) -> Request:
    sampling = SamplingParams(max_new_tokens=new, seed=seed, n=n)
    return Request(ids=ids or (3, 4, 5), sampling=sampling)


def expected(ids: tuple[int, ...], *, new: int = 8, seed: int = 1) -> list[int]:
    alone = fake_runner.make_sequence(ids, max_new_tokens=new, seed=seed)
    return fake_runner.reference_output(alone, 512)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_requests_side_by_side_get_their_own_tokens():
    async with scripted_core.running() as (core, _):
        prompts = [(3, 4, 5), (3, 4, 5, 6, 7, 8, 9), (10,)]
        outputs = [core.submit(request(*prompt)) for prompt in prompts]
        chunks = await asyncio.gather(*(output.whole() for output in outputs))
        assert [chunk.ids for [chunk] in chunks] == [expected(prompt) for prompt in prompts]


async def test_requests_of_one_moment_begin_together():
    async with scripted_core.running() as (core, runner):

        async def ask(num_turns: int) -> OutputStream:  # like handlers, each in its own task
            for _ in range(num_turns):
                await asyncio.sleep(0)
            return core.submit(request(3, 4, seed=num_turns))

        asked = [asyncio.create_task(ask(number)) for number in range(4)]
        for number, task in enumerate(asked):
            [chunk] = await (await task).whole()
            assert chunk.ids == expected((3, 4), seed=number)
        assert runner.sizes[0] == 4


@pytest.mark.parametrize(("turns", "step_tokens"), [(3, 16384), (50, 8)], ids=["turns", "full-step"])
async def test_a_stream_of_arrivals_does_not_hold_up_the_first_step(
    monkeypatch: pytest.MonkeyPatch, turns: int, step_tokens: int
):
    monkeypatch.setattr(scheduler, "MAX_ARRIVAL_TURNS", turns)
    async with scripted_core.running(max_prefill_tokens=step_tokens) as (core, runner):
        outputs = []
        while not runner.num_launched:
            outputs.append(core.submit(request(3, 4, new=1)))
            await asyncio.sleep(0)
        assert len(outputs) < 10
        await asyncio.gather(*(output.whole() for output in outputs))


async def test_a_failure_that_does_not_come_back_costs_no_request():
    async with scripted_core.running(max_running=3) as (core, runner):
        outputs = [core.submit(request(3, 4, new=9, seed=seed)) for seed in range(5)]
        await until(lambda: runner.num_launched >= 4)
        runner.failures = 2
        for seed, output in enumerate(outputs):
            [chunk] = await output.whole()
            assert chunk.ids == expected((3, 4), new=9, seed=seed)
        core.check()


@pytest.mark.parametrize("num_poisonous", [1, 2])
async def test_a_step_that_fails_costs_the_request_alone_for_which_it_fails(num_poisonous: int):
    async with scripted_core.running() as (core, runner):
        sampling = SamplingParams(max_new_tokens=30, seed=1)
        outputs = [core.submit(Request(ids=(seed, 4), sampling=sampling, label=f"number {seed}")) for seed in range(7)]
        await until(lambda: runner.num_launched >= 5)
        lost = [2, 5][:num_poisonous]
        runner.poison = {f"number {seed}" for seed in lost}
        later = core.submit(request(5, 6))
        for seed, output in enumerate(outputs):
            if seed in lost:
                with pytest.raises(StepFailed) as caught:
                    await output.whole()
                assert "secret" not in str(caught.value)
                continue
            [chunk] = await output.whole()
            assert chunk.ids == expected((seed, 4), new=30, seed=1)
        assert (await later.whole())[0].ids == expected((5, 6))
        assert core.status().state == "ready"
        core.check()
        assert core.status().num_used_pages == 0


async def test_a_device_that_always_fails_is_not_asked_for_every_request():
    async with scripted_core.running() as (core, runner):
        runner.failures = 10**6
        outputs = [core.submit(request(3, 4, seed=seed)) for seed in range(8)]
        for output in outputs:
            with pytest.raises(StepFailed):
                await output.whole()
        assert runner.num_launched < 20
        runner.failures = 0
        assert (await core.submit(request(5, 6)).whole())[0].ids == expected((5, 6))
        core.check()


async def test_step_without_memory_costs_its_newest_request_alone():
    async with scripted_core.running() as (core, runner):
        runner.failure = OutOfMemory("secret: 3 GiB")
        outputs = [core.submit(request(3, 4, new=20, seed=seed)) for seed in (1, 2, 3)]
        await until(lambda: runner.num_launched >= 5)
        runner.failures = 1
        with pytest.raises(OutOfMemory, match="ran out of memory") as caught:
            await outputs[2].whole()
        assert (caught.value.status, "secret" in str(caught.value)) == (500, False)
        for seed, output in zip((1, 2), outputs):
            [chunk] = await output.whole()
            assert chunk.ids == expected((3, 4), new=20, seed=seed)
        assert core.status().state == "ready"
        core.check()


async def test_hanging_step_ends_the_engine_with_a_clear_error():
    async with scripted_core.running(watchdog_timeout_s=0.05) as (core, runner):
        runner.open.clear()
        with pytest.raises(EngineFailure, match="hangs"):
            await core.submit(request()).whole()
        await until(lambda: core.status().state == "failed")
        with pytest.raises(EngineClosed):
            core.submit(request())


async def test_full_queue_refuses_the_newest_alone():
    async with scripted_core.running(max_queued=2) as (core, runner):
        runner.open.clear()
        running: list[OutputStream] = [core.submit(request(seed=seed)) for seed in range(scripted_core.NUM_SEQUENCES)]
        await until(lambda: core.status().num_running == scripted_core.NUM_SEQUENCES)
        queued = []
        for seed in (20, 21):
            core.check_queue_space()
            queued.append(core.submit(request(seed=seed)))
        with pytest.raises(Overloaded, match="queue is full"):
            core.check_queue_space()
        with pytest.raises(Overloaded, match="queue is full"):
            core.submit(request())
        runner.open.set()
        for output in running + queued:
            [chunk] = await output.whole()
            assert len(chunk.ids) == 8


async def test_requests_of_one_moment_fill_the_queue_to_its_limit_and_no_further():
    async with scripted_core.running(max_queued=2) as (core, _):
        limit = scripted_core.NUM_SEQUENCES + 2
        taken = [core.submit(request(seed=seed)) for seed in range(limit)]
        with pytest.raises(Overloaded) as caught:
            core.submit(request())
        assert caught.value.retry_after_s > 0
        assert core.status().num_requests == limit
        for output in taken:
            [chunk] = await output.whole()
            assert len(chunk.ids) == 8
        await core.submit(request()).whole()


async def test_too_much_text_at_once_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "MAX_WAITING_BYTES", sys.getsizeof("a" * 6) + sys.getsizeof("a" * 4))
    async with scripted_core.running() as (core, _):
        outputs = [core.submit(Request(text="a" * length)) for length in (6, 4)]
        with pytest.raises(Overloaded, match="text"):
            core.submit(Request(text="a"))
        for output in outputs:
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await output.whole()
        with pytest.raises(InvalidRequest, match="no tokenizer"):  # ids alone may be of any length
            await core.submit(Request(text="a" * 1100)).whole()


async def test_the_prompts_of_one_call_are_let_in_together():
    async with scripted_core.running(max_queued=2) as (core, runner):
        runner.open.clear()
        call = await core.submit_all([request(seed=seed) for seed in range(3 * scripted_core.NUM_SEQUENCES)])
        await until(lambda: core.status().num_running == scripted_core.NUM_SEQUENCES)
        with pytest.raises(Overloaded, match="queue is full"):
            core.submit(request())
        with pytest.raises(Overloaded, match="queue is full"):
            await core.submit_all([request(), request()])
        runner.open.set()
        assert [len(chunks[0].ids) for chunks in await read_all(call)] == [8] * 3 * scripted_core.NUM_SEQUENCES
        core.check()


async def test_who_waits_too_long_is_told_to_come_again():
    async with scripted_core.running(max_queue_time_s=0.02) as (core, runner):
        running = [core.submit(request(seed=seed)) for seed in range(scripted_core.NUM_SEQUENCES)]
        runner.open.clear()
        await until(lambda: core.status().num_running == scripted_core.NUM_SEQUENCES)
        waiting, *following = await core.submit_all([request(seed=20), request(seed=21)])
        with pytest.raises(Overloaded, match="--max-queue-time") as caught:
            await waiting.whole()
        assert caught.value.retry_after_s >= 1
        runner.open.set()
        # running requests, and further prompts of an accepted call, are not affected
        for output in running + following:
            [chunk] = await output.whole()
            assert len(chunk.ids) == 8
        core.check()


def test_the_wait_is_what_is_queued_over_how_fast_the_queue_moves():
    queue = QueueRate()
    assert queue.wait_s(10) == 0  # the rate is unknown
    queue.note(0.0, 3, 0)  # the queue is empty, so a new request starts immediately
    queue.note(1.0, 8, 20)
    queue.note(2.0, 5, 15)
    queue.note(7.0, 5, 10)
    assert queue.wait_s(10) == pytest.approx(10 / (10 / 6))
    queue.note(8.0, 10, 0)
    assert queue.wait_s(10) == pytest.approx(1.0)
    assert queue.wait_s(0) == 0


async def test_generated_tokens_are_those_of_the_outputs():
    async with scripted_core.running(chunk_tokens=4, log_interval_steps=1) as (core, _):
        ids = tuple(range(3, 43))  # ten steps, of which only the last yields a token
        [chunk] = await core.submit(request(*ids, new=5)).whole()
        assert len(chunk.ids) == 5
        await until(lambda: core.status().num_requests == 0)
        assert core.status().num_generated == 5
        assert core.status().num_steps >= 14
        assert core.status().gen_throughput > 0


async def test_an_embedding_reaches_its_output():
    async with scripted_core.running(chunk_tokens=4) as (core, _):
        sequence = fake_runner.make_sequence(range(3, 13), wants_embedding=True)
        asked = core.submit(Request(ids=tuple(range(3, 13)), wants_embedding=True))
        [chunk] = await asked.whole()
        assert chunk.embedding == fake_runner.reference_embedding(sequence)
        assert (chunk.finish, chunk.usage.output, chunk.ids) == (Finish("stop"), 0, [])


async def test_status_names_the_kernels_of_the_runner():
    async with scripted_core.running() as (core, runner):
        assert core.status().kernels == ""
        runner.kernels_description = "C++, AVX2"
        assert core.status().kernels == "C++, AVX2"


@pytest.mark.parametrize("num_turns", range(12))
async def test_abort_at_any_moment_ends_the_reply_and_frees_the_pages(num_turns: int):
    async with scripted_core.running() as (core, _):
        output = core.submit(request(n=3, new=50))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        core.abort(output.request_id)
        chunks = await output.whole()
        assert [chunk.finish.kind for chunk in chunks if chunk.finish] == ["abort"] * 3
        await until(lambda: core.status().num_requests == 0)
        assert core.status().num_used_pages == 0
        core.check()


async def test_abort_by_label_takes_those_that_begin_so():
    async with scripted_core.running() as (core, runner):
        runner.open.clear()
        outputs = [core.submit(replace(request(), label=label)) for label in ("a-1", "a-2", "b-1")]
        assert core.abort_label("a-") == 2
        runner.open.set()
        kinds = [chunk.finish.kind for r in outputs for chunk in await r.whole() if chunk.finish]
        assert kinds == ["abort", "abort", "length"]


async def test_draining_takes_nothing_new_and_ends_with_the_last_reply():
    async with scripted_core.running() as (core, runner):
        runner.open.clear()
        output = core.submit(request())
        draining = asyncio.create_task(core.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="draining"):
            core.submit(request())
        assert not draining.done()
        runner.open.set()
        await draining
        assert (await output.whole())[0].ids == expected((3, 4, 5))


async def test_ids_outside_the_vocabulary_are_refused_at_once():
    async with scripted_core.running() as (core, _):
        for ids in ((-1,), (512,)):
            with pytest.raises(InvalidRequest) as caught:
                core.submit(request(*ids))
            assert caught.value.param == "input_ids"
        assert core.status().num_requests == 0


async def test_cache_is_flushed_only_when_idle():
    async with scripted_core.running() as (core, runner):
        runner.open.clear()
        output = core.submit(request())
        assert not core.flush_cache()
        runner.open.set()
        await output.whole()
        await until(lambda: core.status().num_requests == 0)
        assert core.flush_cache()


async def test_replies_end_when_the_core_ends():
    async with scripted_core.running() as (core, runner):
        runner.open.clear()
        output = core.submit(request())
        await until(lambda: runner.num_launched > 0)
    with pytest.raises(EngineClosed):
        await output.whole()
    assert isinstance(core, EngineCore)
    assert core.status().state == "closed"


def test_a_failure_is_found_at_any_depth_of_nested_groups():
    lost = StepFailed("Worker 1 ended.")
    inner = ExceptionGroup("second actor", [KeyError("b"), ExceptionGroup("its task", [lost])])
    found = _failure(ExceptionGroup("actors", [ExceptionGroup("first actor", [KeyError("a")]), inner]))
    assert type(found) is StepFailed
    assert found.message == "Worker 1 ended."
    other = _failure(ExceptionGroup("actors", [KeyError("a"), ExceptionGroup("inner", [KeyError("b")])]))
    assert type(other) is EngineFailure
