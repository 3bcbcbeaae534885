from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch

import tiny_models
from runtime.errors import ContextOverflow, Overloaded, PenstockError
from serve import ConfigurationError, Engine, EngineClosed, InvalidRequest, SyncEngine

SHORT = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def path() -> str:
    return tiny_models.cached()


async def test_list_of_prompts_answers_in_order(path: str):
    async with Engine(path) as engine:
        prompts = ["Once upon a time", "def add(", "你好"]
        answers = await engine.generate(prompts, SHORT)
        alone = [await engine.generate(prompt, SHORT) for prompt in prompts]
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in alone]


async def test_streamed_text_is_the_whole_text(path: str):
    async with Engine(path) as engine:
        whole = await engine.generate("Once upon a time", {**SHORT, "max_new_tokens": 60})
        pieces = [p async for p in engine.stream("Once upon a time", {**SHORT, "max_new_tokens": 60})]
    assert "".join(piece["delta"] for piece in pieces) == whole["text"] == pieces[-1]["text"]
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


async def test_stop_string_ends_the_text_before_it_wherever_it_falls(path: str):
    async with Engine(path) as engine:
        long = {**SHORT, "max_new_tokens": 60, "ignore_eos": True}
        whole = (await engine.generate("Once upon a time", long))["text"]
        for start in range(2, len(whole) - 3, 5):
            stop = whole[start : start + 3]
            answer = await engine.generate("Once upon a time", {**long, "stop": stop})
            assert answer["text"] == whole[: whole.index(stop)]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            kept = await engine.generate("Once upon a time", {**long, "stop": stop, "no_stop_trim": True})
            assert kept["text"] == whole[: whole.index(stop)] + stop


async def test_same_seed_gives_the_same_text_alone_and_in_any_crowd(path: str):
    sampling = {"temperature": 1.0, "max_new_tokens": 20, "seed": 7, "ignore_eos": True, "n": 2}
    async with Engine(path) as engine:
        alone = await engine.generate("Once upon a time", sampling)
        crowd = [{"temperature": 1.5, "max_new_tokens": 20, "top_p": 0.9, "frequency_penalty": 1.0}] * 10
        answers = await engine.generate(["Once upon a time"] * 11, [*crowd[:5], {**sampling, "n": 1}, *crowd[5:]])
        assert [a["text"] for a in await engine.generate("Once upon a time", sampling)] == [a["text"] for a in alone]
    assert answers[5]["text"] == alone[0]["text"] != alone[1]["text"]


async def test_logit_bias_may_name_tokens_by_integers(path: str):
    async with Engine(path) as engine:
        answer = await engine.generate("x", {**SHORT, "logit_bias": {65: 1000.0}})
    assert set(answer["output_ids"]) == {65}


async def test_wrong_call_hurts_nobody_else(path: str):
    async with Engine(path) as engine:
        good = asyncio.create_task(engine.generate("Once upon a time", {**SHORT, "max_new_tokens": 40}))
        await asyncio.sleep(0)
        wrong: list[dict[str, Any]] = [
            {"prompt": "x", "sampling_params": {"temperature": -1}},
            {"prompt": "x", "sampling_params": {"temprature": 1}},
            {"prompt": "x", "no_such_option": 1},
            {"prompt": b"x"},
            {"prompt": ""},
            {"input_ids": [10**9]},
            {"input_ids": [3] * 5000},
            {"prompt": "x", "sampling_params": {"max_new_tokens": 10**6}},
            {"prompt": "x", "input_ids": [3]},
        ]
        for call in wrong:
            with pytest.raises(InvalidRequest):
                await engine.generate(**call)
        assert (await good)["meta_info"]["completion_tokens"] == 40
        assert engine.status().num_requests == 0


async def test_leaving_a_stream_gives_the_pages_back(path: str):
    async with Engine(path) as engine:
        async for _ in engine.stream("Once upon a time", {"max_new_tokens": 1000, "ignore_eos": True}):
            break
        while engine.status().num_running:
            await asyncio.sleep(0)
        assert engine.status().num_used_pages == 0


async def test_closing_ends_what_is_waited_for(path: str):
    engine = Engine(path)
    await engine.start()
    waiting = asyncio.create_task(engine.generate("Once", {"max_new_tokens": 2000, "ignore_eos": True}))
    while not engine.status().num_running:
        await asyncio.sleep(0)
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(EngineClosed):
        await engine.generate("Once")
    await engine.aclose()


async def test_engine_is_a_good_guest(path: str):
    def world() -> tuple:
        root = logging.getLogger()
        return (
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)],
            type(asyncio.get_event_loop_policy()),
            multiprocessing.get_start_method(allow_none=True),
            (root.level, list(root.handlers)),
            len(asyncio.all_tasks()),
            sorted(thread.name for thread in threading.enumerate() if "AnyIO" not in thread.name),
            torch.get_num_threads(),
            (gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval()),
        )

    before, children = world(), psutil.Process().children()  # other tests may have left child processes
    async with Engine(path) as engine:
        await engine.generate("Once", SHORT)
        assert psutil.Process().children() == children
        model = weakref.ref(engine.core.runners[0]._executor._model)  # pyright: ignore[reportAttributeAccessIssue]
    del engine
    assert world() == before
    gc.collect()
    assert model() is None


async def test_wrong_options_are_refused_together_before_anything_starts(tmp_path):
    threads = set(threading.enumerate())
    with pytest.raises(ConfigurationError) as caught:
        Engine(page_siz=3, context_length="long")
    assert len(caught.value.refusals) == 2
    with pytest.raises(ConfigurationError, match="no model"):
        await Engine(str(tmp_path)).start()
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("penstock")]


async def test_sync_engine_works_beside_a_running_loop(path: str):
    threads = set(threading.enumerate())
    with SyncEngine(path) as engine:
        answer = engine.generate("Once upon a time", SHORT)
        pieces = list(engine.stream("Once upon a time", SHORT))
        assert pieces[-1]["text"] == answer["text"]
        for _ in engine.stream("Once", {"max_new_tokens": 1000, "ignore_eos": True}):
            break
        with pytest.raises(InvalidRequest):
            engine.generate("Once", {"temperature": -1})
    with pytest.raises(EngineClosed):
        engine.generate("Once")
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("penstock")]


def test_sync_engine_works_without_a_loop(path: str):
    with SyncEngine(path) as engine:
        assert engine.generate("Once", SHORT)["meta_info"]["completion_tokens"] <= 8


@pytest.mark.parametrize(
    "lines",
    [
        "print(engine.generate('Once', {'max_new_tokens': 2})['meta_info']['completion_tokens'])",
        # The first piece has one token, or both if the reader was late.
        "print(next(engine.stream('Once', {'max_new_tokens': 2}))['index'] + 2)",
    ],
)
def test_process_ends_though_nobody_closed_the_engine(path: str, lines: str):
    code = f"from serve import SyncEngine; engine = SyncEngine({path!r}); engine.start(); {lines}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")


@pytest.mark.parametrize("streamed", [True, False])
def test_interrupt_of_a_sync_call_ends_its_request(path: str, streamed: bool):
    endless = {"max_new_tokens": 1900, "ignore_eos": True}
    with SyncEngine(path) as engine:

        def interrupt() -> None:
            while not engine.status().num_running:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            list(engine.stream("Once", endless)) if streamed else engine.generate("Once", endless)
        while engine.status().num_requests:
            pass
        assert engine.status().num_generated < 1800
        assert engine.generate("Once", SHORT)["output_ids"]


async def test_prompt_logprobs_do_not_depend_on_the_cache(path: str):
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    async with Engine(path, page_size=4, chunked_prefill_size=16) as engine:
        cold = await engine.generate("Once upon a time a small engine lived", SHORT, **options)
        warm = await engine.generate("Once upon a time a small engine lived", SHORT, **options)
    cold, warm = cold["meta_info"], warm["meta_info"]
    assert cold["prompt_tokens"] == len(cold["input_token_logprobs"]) == len(cold["input_top_logprobs"])
    for name in ("input_token_logprobs", "output_token_logprobs"):
        for one, other in zip(cold[name], warm[name], strict=True):
            assert one[1] == other[1]
            assert one[0] == (None if other[0] is None else pytest.approx(other[0], abs=1e-4))


async def test_raw_logprobs_of_outputs_are_those_of_prompts(path: str):
    sampling = {"max_new_tokens": 6, "temperature": 0.4, "sampling_seed": 3, "logit_bias": {"7": 2.0}}
    async with Engine(path, logprobs_mode="raw_logprobs") as engine:
        drawn = await engine.generate(input_ids=[5, 6, 7], sampling_params=sampling, return_logprob=True)
        read = await engine.generate(
            input_ids=[5, 6, 7, *drawn["output_ids"]],
            sampling_params=SHORT,
            return_logprob=True,
            logprob_start_len=2,
        )
    found = [each[:2] for each in drawn["meta_info"]["output_token_logprobs"]]
    expected = [each[:2] for each in read["meta_info"]["input_token_logprobs"][1:]]
    assert len(expected) == 6
    assert found == [[pytest.approx(logprob, abs=1e-4), token_id] for logprob, token_id in expected]


async def test_a_text_far_too_long_costs_no_tokenizing(path: str, monkeypatch: pytest.MonkeyPatch):
    async with Engine(path, max_total_tokens=512) as engine:
        encoded: list[str] = []
        tokenizer = engine.core.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode_batch

        def noted(texts: Sequence[str], **flags: bool) -> list[list[int]]:
            encoded.extend(texts)
            return encode(texts, **flags)

        monkeypatch.setattr(tokenizer, "encode_batch", noted)
        with pytest.raises(ContextOverflow, match="at least"):
            await engine.generate("lorem ipsum " * 100_000)
        assert encoded == []
        assert (await engine.generate("lorem ipsum", {"max_new_tokens": 1}))["output_ids"]
        assert encoded == ["lorem ipsum"]


async def test_a_full_queue_refuses_before_a_call_is_read(path: str):
    async with Engine(path, max_running_requests=1, max_queued_requests=1) as engine:
        kept = [asyncio.create_task(engine.generate("Once", {"max_new_tokens": 400, "ignore_eos": True}))]
        while not engine.status().num_running:
            await asyncio.sleep(0)
        kept.append(asyncio.create_task(engine.generate("Twice")))
        while not engine.status().num_waiting:
            await asyncio.sleep(0)
        for call in (
            engine.generate("", wrong=1),
            anext(engine.stream("", wrong=1)),
            engine.chat("", wrong=1),
            anext(engine.chat_stream("", wrong=1)),
            engine.encode(""),
            engine.classify(""),
            engine.rerank("", []),
            engine.score("", [], []),
        ):
            with pytest.raises(Overloaded):
                await call
        engine.abort(abort_all=True)
        await asyncio.gather(*kept)


async def test_a_list_of_prompts_of_any_length_may_wait(path: str):
    async with Engine(path, max_running_requests=2, max_total_tokens=512) as engine:
        answers = await engine.generate(["a", "b"] * 30, {"max_new_tokens": 2})
        assert len(answers) == 60
        assert len(await asyncio.gather(*[engine.generate("a", {"max_new_tokens": 2}) for _ in range(40)])) == 40


async def test_metrics_from_python_are_those_of_this_engine(path: str):
    async with Engine(path, enable_metrics=True) as engine, Engine(path) as other:
        await engine.generate("Once upon a time", {**SHORT, "ignore_eos": True})
        text = engine.metrics()
        with pytest.raises(PenstockError, match="enable_metrics"):
            other.metrics()
    assert "\nsglang:generation_tokens_total{" in text
    [line] = [line for line in text.splitlines() if line.startswith("sglang:generation_tokens_total{")]
    assert line.endswith(" 8.0")


def test_metrics_from_a_script(path: str):
    with SyncEngine(path, enable_metrics=True) as engine:
        assert "\nsglang:num_running_reqs{" in engine.metrics()
