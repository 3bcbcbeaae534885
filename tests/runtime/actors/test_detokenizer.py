from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from runtime.actors import detokenizer as detokenizer_module
from runtime.actors.detokenizer import TURN_DELTAS, DetokenizerActor
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.errors import EngineFailure
from runtime.request import Delta, Finish, Request, Usage
from runtime.sampling_params import SamplingParams

END = Finish("length", length=2)
BAD = 66


class Letters:
    """A fake tokenizer and its decoders: every id is a letter, and one id raises an exception."""

    def decoder(self, *given: Any) -> Letters:
        return self

    def push(self, ids: list[int]) -> str:
        if BAD in ids:
            raise IndexError("inside a foreign library")
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


class Scheduled:
    """A fake SchedulerHandle."""

    def __init__(self) -> None:
        self.aborted: list[int] = []
        self.ended: list[tuple[int, int]] = []

    def abort(self, live: LiveRequest) -> None:
        self.aborted.append(live.request.id)

    def end_choice(self, live: LiveRequest, index: int) -> None:
        self.ended.append((live.request.id, index))


@pytest.fixture
def requests() -> LiveRequests:
    return LiveRequests()


@pytest.fixture
def actor(requests: LiveRequests) -> DetokenizerActor:
    tokenizer: Any = Letters()
    return DetokenizerActor(tokenizer, requests)


def start(requests: LiveRequests, scheduler: Scheduled | None = None, **sampling: Any) -> LiveRequest:
    live = requests.add(Request(ids=(1,), sampling=SamplingParams(**sampling)))
    live.scheduler = scheduler
    return live


def delta(live: LiveRequest, token: int, finish: Finish | None = None, index: int = 0, **values: Any) -> Delta:
    return Delta(live.request.id, index, [token], finish, Usage(1, 1, 0), **values)


async def test_output_that_cannot_be_decoded_costs_its_request_alone(requests: LiveRequests, actor: DetokenizerActor):
    scheduler = Scheduled()
    good, bad = start(requests, scheduler), start(requests, scheduler)
    actor.process([delta(bad, BAD), delta(good, 97)])
    actor.process([delta(bad, 97), delta(good, 98, END)])
    with pytest.raises(EngineFailure, match="could not be decoded"):
        await bad.output.whole()
    assert [chunk.text for chunk in await good.output.whole()] == ["ab"]
    assert scheduler.aborted == [bad.request.id]
    assert len(requests) == 0


async def test_others_get_the_loop_while_a_step_of_many_streams_is_decoded(
    requests: LiveRequests, actor: DetokenizerActor, monkeypatch: pytest.MonkeyPatch
):
    clock = count()
    # every reading of the clock is one second later
    monkeypatch.setattr(detokenizer_module, "monotonic", lambda: next(clock))
    streams = [start(requests) for _ in range(4 * TURN_DELTAS)]
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0)
    actor.inbox.put([delta(live, 97) for live in streams])
    actor.inbox.put([delta(live, 98, END) for live in streams])
    seen = []
    while len(requests):
        await asyncio.sleep(0)
        seen.append(len(requests))
    running.cancel()
    assert {0, TURN_DELTAS, 2 * TURN_DELTAS, 3 * TURN_DELTAS} <= set(seen)
    for live in streams:  # the order of each stream's pieces is unchanged
        assert [chunk.text for chunk in await live.output.whole()] == ["ab"]


async def test_scheduler_learns_of_a_stop_string(requests: LiveRequests, actor: DetokenizerActor):
    scheduler = Scheduled()
    live = start(requests, scheduler, n=2, stop=("b",))
    actor.process([delta(live, 97, index=0), delta(live, 98, index=0), delta(live, 97, END, index=1)])
    actor.process([delta(live, 99, index=0)])  # this delta was already on its way
    assert scheduler.ended == [(live.request.id, 0)]
    first, second = await live.output.whole()
    assert (first.text, first.finish, second.text) == ("a", Finish("stop", matched="b"), "a")
    assert len(requests) == 0


async def test_an_embedding_passes_through(requests: LiveRequests, actor: DetokenizerActor):
    live = start(requests)
    last = delta(live, 0, Finish("stop"), embedding=[0.6, 0.8])._replace(ids=[])
    actor.process([last])
    [chunk] = await live.output.whole()
    assert (chunk.text, chunk.ids, chunk.finish, chunk.embedding) == ("", [], Finish("stop"), [0.6, 0.8])
