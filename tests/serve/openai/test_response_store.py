"""The stored responses are limited in number and in bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from serve.openai.responses.store import ResponseStore, StoredResponse


def stored(name: str, text: str = "", task: Any = None) -> StoredResponse:
    return StoredResponse({"id": name, "output": []}, "", [], [], len(text), task)


def test_oldest_make_room_by_number() -> None:
    store = ResponseStore(max_responses=3)
    for index in range(10):
        store.put(stored(f"r{index}"))
    assert [store.find(f"r{index}", "") is not None for index in range(10)] == [False] * 7 + [True] * 3


def test_oldest_make_room_by_bytes() -> None:
    store = ResponseStore(max_bytes=4000)
    for index in range(50):
        store.put(stored(f"r{index}", "x" * (index * 20)))
        assert store.num_bytes <= 4000
    assert store.find("r49", "") is not None
    assert 1 < len(store) < 6


def test_one_that_is_larger_than_all_room_is_not_kept() -> None:
    store = ResponseStore(max_bytes=100)
    store.put(stored("r", "x" * 200))
    assert (len(store), store.num_bytes) == (0, 0)


def test_bytes_are_those_of_what_it_has_become() -> None:
    store = ResponseStore()
    one = stored("r")
    store.put(one)
    before = store.num_bytes
    one.response["output"] = ["x" * 1000]
    store.update(one)
    assert 1000 <= store.num_bytes - before < 2100
    store.delete("r", "")
    store.update(one)  # it was deleted in the meantime
    assert (len(store), store.num_bytes) == (0, 0)


async def test_what_is_still_written_stays() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    store = ResponseStore(max_responses=2)
    store.put(stored("running", task=task))
    for index in range(5):
        store.put(stored(f"r{index}"))
    assert store.num_running == 1
    assert store.find("running", "") is not None
    store.delete("running", "")
    await asyncio.wait([task])
    assert task.cancelled()
