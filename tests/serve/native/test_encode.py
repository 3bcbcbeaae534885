"""`Engine.encode` and `SyncEngine.encode` with a scripted engine core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest

import fake_core
from runtime.actors.engine_core import EngineCore
from runtime.actors.output_stream import OutputStream
from runtime.errors import EngineFailure
from runtime.request import Chunk, Finish, Request, Usage
from serve import Engine, InvalidRequest, SyncEngine
from serve.python.engine import EngineLife


class EncodingCore:
    """Answers each prompt with the vector (its number of tokens, 0.5)."""

    def __init__(self) -> None:
        self.plan, self.facts, self.tokenizer = fake_core.make_plan(), fake_core.make_facts(), None
        self.submitted: list[Request] = []
        self.failure: EngineFailure | None = None

    submit_all: Any = EngineCore.submit_all

    def check_queue_space(self) -> None:
        """Do nothing: there is always space."""

    def submit(self, request: Request) -> OutputStream:
        self.submitted.append(request)
        stream = OutputStream(request.id, 1, abort=lambda _: None)
        if self.failure is not None:
            stream.fail(self.failure)
            return stream
        count = len(request.ids or request.text or ())
        vector = None if request.label.startswith("aborted") else [float(count), 0.5]
        finish = Finish("stop") if vector else Finish("abort", message="Aborted by the user.")
        stream.put(Chunk(0, "", [], finish, Usage(count, 0, 0), embedding=vector))
        return stream


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> EncodingCore:
    """The core of every engine that is started."""
    core = EncodingCore()

    async def run(self: EngineLife, started: Callable[[], None]) -> None:
        self.core = cast(Any, core)
        started()
        await anyio.sleep_forever()

    monkeypatch.setattr(EngineLife, "run", run)
    return core


async def test_one_prompt_is_answered_with_one_vector(core: EncodingCore):
    async with Engine() as engine:
        answer = await engine.encode("Hello")
    assert answer["embedding"] == [5.0, 0.5]
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == 5
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    [request] = core.submitted
    assert meta["id"] == request.label
    assert request.wants_embedding
    assert (request.sampling.max_new_tokens, request.sampling.n) == (0, 1)


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": ["a", "abc", "ab"]},
        {"input_ids": [[1], [1, 2, 3], [1, 2]]},
        {"input_ids": ((1,), (1, 2, 3), (1, 2))},
    ],
)
async def test_list_of_prompts_answers_in_order(core: EncodingCore, call: dict[str, Any]):
    async with Engine() as engine:
        answers = await engine.encode(**call, rid=["x", "y", "z"])
    assert [answer["embedding"][0] for answer in answers] == [1.0, 3.0, 2.0]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y", "z"]


async def test_ids_of_one_prompt_are_one_vector(core: EncodingCore):
    async with Engine() as engine:
        assert (await engine.encode(input_ids=[1, 2, 3]))["embedding"] == [3.0, 0.5]


async def test_preferred_sampling_of_the_server_does_not_touch_it(core: EncodingCore):
    core.plan = fake_core.make_plan(preferred_sampling={"n": 3, "max_new_tokens": 7})
    async with Engine() as engine:
        await engine.encode("Hello")
    assert (core.submitted[0].sampling.max_new_tokens, core.submitted[0].sampling.n) == (0, 1)


async def test_aborted_request_has_no_vector(core: EncodingCore):
    async with Engine() as engine:
        answers = await engine.encode(["a", "b"], rid=["aborted", "kept"])
    assert [answer["embedding"] for answer in answers] == [None, [1.0, 0.5]]
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": "a", "input_ids": [1]},
        {"input_ids": "a"},
        {"prompt": 5},
    ],
)
async def test_wrong_call_is_refused(core: EncodingCore, call: dict[str, Any]):
    async with Engine() as engine:
        with pytest.raises(InvalidRequest):
            await engine.encode(**call)
    assert core.submitted == []


async def test_failure_is_raised(core: EncodingCore):
    core.failure = EngineFailure("A step failed.")
    async with Engine() as engine:
        with pytest.raises(EngineFailure, match="A step failed"):
            await engine.encode(["a", "b"])


def test_sync_engine_encodes(core: EncodingCore):
    with SyncEngine() as engine:
        assert engine.encode("Hello")["embedding"] == [5.0, 0.5]
        assert [answer["embedding"] for answer in engine.encode(input_ids=[[1], [1, 2]])] == [
            [1.0, 0.5],
            [2.0, 0.5],
        ]
