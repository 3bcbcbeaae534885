from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from runtime.actors.live_requests import LiveRequests
from runtime.errors import EngineClosed, StepFailed
from runtime.request import Request
from runtime.sampling_params import SamplingParams


def request(label: str = "", n: int = 1) -> Request:
    return Request(ids=(1, 2), sampling=SamplingParams(n=n), label=label)


async def test_a_request_without_a_scheduler_ends_at_once_when_it_is_aborted():
    requests = LiveRequests()
    live = requests.add(request(n=2))
    requests.abort(live.request.id)
    requests.abort(live.request.id)
    chunks = await live.output.whole()
    assert [chunk.finish.kind for chunk in chunks if chunk.finish] == ["abort", "abort"]
    assert len(requests) == 0


async def test_a_failed_request_is_forgotten():
    requests = LiveRequests()
    live, other = requests.add(request()), requests.add(request())
    requests.fail(live.request.id, StepFailed("gone"))
    requests.fail(live.request.id, StepFailed("again"))
    with pytest.raises(StepFailed, match="gone"):
        await live.output.whole()
    assert list(requests) == [other]
    requests.fail_all(EngineClosed("The engine is shut down."))
    assert list(requests) == []


async def test_labels_are_matched_by_their_beginning():
    requests = LiveRequests()
    for label in ("a-1", "a-2", "b-1"):
        requests.add(request(label))
    assert requests.abort_label("a-") == 2
    assert [live.request.label for live in requests] == ["b-1"]
    assert requests.abort_label("") == 1


async def test_an_exact_label_also_means_the_batch_of_this_name():
    requests = LiveRequests()
    for label, batch in (("a", None), ("a_0", None), ("b_0", "b"), ("b_1", "b"), ("b_2", None)):
        requests.add(replace(request(label), batch=batch))
    assert requests.abort_label("a", exact=True) == 1
    assert requests.abort_label("b", exact=True) == 2
    assert requests.abort_label("", exact=True) == 0
    assert [live.request.label for live in requests] == ["a_0", "b_2"]


def test_an_observer_that_is_added_twice_is_removed_once() -> None:
    class Tokens:
        def began(self, live: object) -> None: ...

        def sent(self, live: object, chunk: object, now_s: float, before_s: float) -> None: ...

        def ended(self, live: object, error: object) -> None: ...

    requests, observer = LiveRequests(), Tokens()
    requests.observe(observer)
    requests.observe(observer)
    requests.stop_observing(observer)
    assert requests.observers == requests.token_observers == [observer]
    requests.stop_observing(observer)
    assert requests.observers == requests.token_observers == []


async def test_waiting_ends_with_the_last_request():
    requests = LiveRequests()
    await requests.wait_idle()
    first, second = requests.add(request()), requests.add(request())
    waiting = asyncio.create_task(requests.wait_idle())
    requests.remove(first)
    await asyncio.sleep(0)
    assert not waiting.done()
    requests.remove(second)
    await asyncio.wait_for(waiting, 1)
