"""Sessions continue the tokens of earlier requests: the output equals that of the whole prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import tiny_models
from runtime.actors import sessions
from runtime.actors.sessions import Sessions
from runtime.errors import InvalidRequest
from runtime.request import Request, SessionParams
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.server.app import build_app

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "max_total_tokens": 2048, "page_size": 4}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(tiny_models.cached(), **OPTIONS) as running:
        yield running


async def ask(engine: Engine, ids: list[int], **session: Any) -> tuple[str, list[int]]:
    more: Any = {"session_params": session} if session else {}
    answer = await engine.generate(input_ids=ids, sampling_params=GREEDY, **more)
    return answer["meta_info"]["id"], answer["output_ids"]


async def test_turns_equal_whole_prompts_and_use_the_cache(engine: Engine):
    session = engine.open_session(1000)
    first, one = [5, 6, 7, 8, 9], [10, 11]
    rid, output = await ask(engine, first, id=session)
    assert output == (await ask(engine, first))[1]
    answer = await engine.generate(input_ids=one, sampling_params=GREEDY, session_params={"id": session, "rid": rid})
    assert answer["output_ids"] == (await ask(engine, [*first, *output, *one]))[1]
    assert answer["meta_info"]["prompt_tokens"] == len(first) + len(output) + len(one)
    assert answer["meta_info"]["cached_tokens"] >= 8
    # A branch from the first turn, a cut one, and one without the output.
    for more, known in (
        ({}, [*first, *output]),
        ({"offset": 3}, first[:3]),
        ({"offset": -2}, [*first, *output][:-2]),
        ({"drop_previous_output": True}, first),
    ):
        _, again = await ask(engine, one, id=session, rid=rid, **more)
        assert again == (await ask(engine, [*known, *one]))[1], more
    engine.close_session(session)
    with pytest.raises(InvalidRequest, match="is not open"):
        await ask(engine, one, id=session, rid=rid)


async def test_replace_forgets_what_continues_the_turn(engine: Engine):
    """Turns of other branches stay, also those that came later."""
    session = engine.open_session(1000, "mine")
    one, _ = await ask(engine, [5, 6], id=session)
    two, _ = await ask(engine, [7], id=session, rid=one)
    other, output = await ask(engine, [8], id=session)
    three, _ = await ask(engine, [7], id=session, rid=two)
    _, later = await ask(engine, [9], id=session, rid=other)
    await ask(engine, [8], id=session, rid=one, replace=True)
    for forgotten in (two, three):
        with pytest.raises(InvalidRequest, match="has no request"):
            await ask(engine, [9], id=session, rid=forgotten)
    assert (await ask(engine, [9], id=session, rid=other))[1] == later == (await ask(engine, [8, *output, 9]))[1]
    await ask(engine, [9], id=session, rid=one)
    await ask(engine, [9], id=session, replace=True)
    for forgotten in (one, other):
        with pytest.raises(InvalidRequest, match="has no request"):
            await ask(engine, [9], id=session, rid=forgotten)


async def test_replace_follows_turns_whose_label_is_used_again(engine: Engine):
    session = engine.open_session(1000)
    one, _ = await ask(engine, [5, 6], id=session)
    for _ in range(3):  # each continues the one before, under the same name
        await engine.generate(
            input_ids=[7], sampling_params=GREEDY, rid="again", session_params={"id": session, "rid": one}
        )
        one_or_again = {"id": session, "rid": "again"}
        await engine.generate(input_ids=[7], sampling_params=GREEDY, rid="again", session_params=one_or_again)
    await ask(engine, [8], id=session, rid=one, replace=True)
    with pytest.raises(InvalidRequest, match="has no request"):
        await ask(engine, [9], id=session, rid="again")


def test_replace_forgets_a_turn_that_was_live_at_an_earlier_replace():
    """The turn between them was forgotten by the earlier one."""
    table = Sessions(None)
    table.open(100, "s")

    def begin(name: str, rid: str | None, *, replace: bool = False) -> Any:
        session = SessionParams("s", rid, replace=replace)
        request = Request(ids=(1,), sampling=SamplingParams(), label=name, session=session)
        ids = table.continued(request, request.ids or ())
        sequence = SimpleNamespace(ids=[*ids], num_prompt=len(ids))
        usage = SimpleNamespace(usage=SimpleNamespace(output=0))
        return SimpleNamespace(request=request, sequences=[sequence], ends=[usage])

    table.ended(begin("a", None), None)
    table.ended(begin("b", "a"), None)
    live = begin("c", "b")
    begin("d", "a", replace=True)
    table.ended(live, None)
    begin("e", "a", replace=True)
    with pytest.raises(InvalidRequest, match="has no request 'c'"):
        begin("f", "c")


async def test_what_a_session_refuses(engine: Engine):
    session = engine.open_session(8, "small")
    with pytest.raises(InvalidRequest, match="open already"):
        engine.open_session(8, "small")
    with pytest.raises(InvalidRequest, match="9 tokens, and the session 8"):
        await ask(engine, list(range(9)), id=session)
    with pytest.raises(InvalidRequest, match="one prompt and one choice"):
        await engine.generate(input_ids=[[1], [2]], sampling_params=GREEDY, session_params={"id": session})
    with pytest.raises(InvalidRequest, match="has no request"):
        await ask(engine, [1], id=session, rid="unknown")
    await ask(engine, [1, 2], id=session)


async def test_sessions_over_http(engine: Engine):
    transport = httpx.ASGITransport(build_app(engine.core))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        opened = await http.post("/open_session", json={"capacity_of_str_len": 500})
        session = opened.json()
        assert isinstance(session, str)
        body = {"input_ids": [3, 4, 5], "sampling_params": GREEDY, "session_params": {"id": session}}
        first = (await http.post("/generate", json=body)).json()
        body |= {"input_ids": [6], "session_params": {"id": session, "rid": first["meta_info"]["id"]}}
        second = (await http.post("/generate", json=body)).json()
        assert second["output_ids"] == (await ask(engine, [3, 4, 5, *first["output_ids"], 6]))[1]
        assert (await http.post("/close_session", json={"session_id": session})).status_code == 200
        assert (await http.post("/generate", json=body)).status_code == 400
        assert (await http.post("/close_session", json={"session_id": session})).status_code == 400
        assert (await http.post("/open_session", json={"capacity_of_str_len": 0})).status_code == 400


def test_other_clients_cannot_use_a_session_and_limits_close_the_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    table = Sessions(None)
    table.open(10, "a", "ada")
    with pytest.raises(InvalidRequest, match="is not open"):
        table.close("a", "bob")
    table.open(10, "b")
    table.open(10, "c")
    assert len(table) == 2
    with pytest.raises(InvalidRequest, match="is not open"):
        table.close("a", "ada")


def test_a_client_with_many_sessions_or_tokens_closes_its_own_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    table = Sessions(None)
    table.open(10, "a", "ada")
    for number in range(5):
        table.open(10, f"b{number}", "bob")
    with pytest.raises(InvalidRequest, match="is not open"):
        table.close("b2", "bob")
    for name, owner in (("a", "ada"), ("b3", "bob"), ("b4", "bob")):
        table.close(name, owner)
    assert not len(table)
