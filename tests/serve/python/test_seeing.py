from __future__ import annotations

import asyncio
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tiny_models
from runtime.errors import ConfigurationError, InvalidRequest
from serve import Engine, Recording, SyncEngine
from serve.cli.replay import main

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


async def test_an_engine_shows_its_state_before_while_and_after() -> None:
    engine = Engine(tiny_models.cached())
    assert "not running" in engine._repr_html_()
    await engine.start()
    assert "ready" in engine._repr_html_()
    assert "reserved for" in engine._repr_html_()
    await engine.aclose()
    assert "not running" in repr(engine)


async def test_status_is_short_and_has_no_absurd_numbers() -> None:
    async with Engine(tiny_models.cached()) as engine:
        text = repr(engine.status())
        assert len(text) < 250
        assert not re.search(r"\d{12}", text)
        assert "no limit" in text


async def test_view_shows_steps_and_requests_and_ends_with_the_engine() -> None:
    tasks = asyncio.all_tasks()
    async with Engine(tiny_models.cached()) as engine:
        view = engine.watch(per_second=10)
        with pytest.raises(InvalidRequest, match="already"):
            engine.watch()
        await engine.generate(["Once upon a time", "<b>"], {"max_new_tokens": 5}, rid=["<i>", "two"])
        shown = view._repr_html_()
        assert "last" in shown
        assert "prefill" in shown
        assert "<i>" not in shown
        assert "0 running" in repr(view)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks


async def test_waiting_requests_say_why() -> None:
    async with Engine(tiny_models.cached(), max_running_requests=1) as engine:
        calls = [asyncio.create_task(engine.generate("Once", LONG, rid=f"call{number}")) for number in range(3)]
        while engine.status().num_waiting < 2:
            await asyncio.sleep(0)
        reasons = engine.why_waiting()
        assert len(reasons) == 2
        assert all("max_running_requests" in reason for reason in reasons)
        waiting = reasons[0].split(":")[0]
        assert len(engine.why_waiting(waiting)) == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_prefix_tree_is_shown_with_its_branches() -> None:
    async with Engine(tiny_models.cached(), page_size=2) as engine:
        await engine.generate(["Once upon a time", "Once upon a day that"], {"max_new_tokens": 2})
        assert str(engine.prefix_tree()).count("└") >= 3
        assert "└" in engine.prefix_tree()._repr_html_()


async def test_a_generation_is_coloured_where_its_log_probabilities_are_known() -> None:
    async with Engine(tiny_models.cached()) as engine:
        g = engine.open("Once upon", temperature=0, logprobs=True)
        await g.generate(4, ignore_eos=True)
        [token] = [token async for token in g.tokens(1, ignore_eos=True)]
        assert token.logprob is not None
        assert g._repr_html_().count("logprob ") == 5
        assert g.fork(1)[0]._repr_html_() == g._repr_html_()
        g.rewind(2)
        g.append(" a time")
        assert g._repr_html_().count("logprob ") == 3
        assert "logprob " not in engine.open("Once")._repr_html_()


async def test_choices_and_embeddings_are_shown() -> None:
    async with Engine(tiny_models.cached()) as engine:
        chosen = await engine.open("Once").select([" <a>", " b"])
        assert chosen._repr_html_().count("<tr>") == 3
        assert "<b><div" in chosen._repr_html_()
        assert "<a>" not in chosen._repr_html_()
        vector = await engine.encode("Once")
        assert f"{len(vector.embedding)} numbers" in vector._repr_html_()
        assert str(engine.tokenizer.vocab_size) in repr(engine.tokenizer)


def test_sync_engine_shows_the_same() -> None:
    with SyncEngine(tiny_models.cached()) as engine:
        assert "ready" in engine._repr_html_()
        view = engine.watch()
        engine.generate("Once", {"max_new_tokens": 3})
        assert "running" in repr(engine)
        view.stop()
    assert "closed" in repr(engine)


def test_a_recording_shows_the_times_that_the_engine_reports(tmp_path: Path) -> None:
    with SyncEngine(tiny_models.cached(), record=str(tmp_path / "a.record"), max_running_requests=1) as engine:
        answers = engine.generate(["Once", "upon a time", "there"], {"max_new_tokens": 6, "ignore_eos": True})
    recording = Recording(tmp_path / "a.record")
    assert [each.num_output for each in recording.requests] == [6, 6, 6]
    for answer, life in zip(answers, recording.requests, strict=True):
        assert life.num_prompt == answer.meta_info.prompt_tokens
        assert life.begun_s is not None and life.first_s is not None and life.last_s is not None  # noqa: PT018
        assert life.added_s <= life.begun_s < life.first_s <= life.last_s
        assert life.finish == "length"
    first, second, third = (each.begun_s or 0.0 for each in recording.requests)
    assert first < second < third  # one request runs at a time
    num_prompt = sum(each.num_prompt for each in recording.requests)
    assert sum(step.num_prompt_tokens for step in recording.steps) == num_prompt
    assert main([str(tmp_path / "a.record"), "--plot", str(tmp_path / "a.svg")]) == 0
    with pytest.raises(ConfigurationError, match="--model-path"):
        main([str(tmp_path / "a.record"), "--plot", str(tmp_path / "a.svg"), "--model-path", "x"])
    plot = ElementTree.parse(tmp_path / "a.svg").getroot()
    bars = [each for each in plot.iter() if each.tag.endswith("title") and "decode" in (each.text or "")]
    assert len(bars) == 3
    assert ElementTree.fromstring(recording._repr_html_()).tag == plot.tag
