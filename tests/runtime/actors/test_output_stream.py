from __future__ import annotations

import asyncio

import pytest

from runtime.actors import output_stream as output_stream_module
from runtime.actors.output_stream import OutputStream, read_all
from runtime.errors import InvalidRequest, StepFailed
from runtime.request import Chunk, Finish, Logprobs, Usage

END = Finish("length", length=3)


def chunk(text: str, finish: Finish | None = None, index: int = 0, ids: tuple[int, ...] = (7,)) -> Chunk:
    logprobs = Logprobs([(-0.5, token_id) for token_id in ids], [None] * len(ids), [])
    return Chunk(index, text, list(ids), finish, Usage(2, len(text), 0), logprobs)


def make_output(n: int = 1) -> tuple[OutputStream, list[int]]:
    aborted: list[int] = []
    return OutputStream(7, n, aborted.append), aborted


async def test_unread_chunks_coalesce_into_one_per_choice():
    output, aborted = make_output(n=2)
    for text in ("a", "b", "c"):
        output.put(chunk(text, END if text == "c" else None, index=0))
    output.put(chunk("x", END, index=1))
    wakes = [chunks async for chunks in output.chunks()]
    assert len(wakes) == 1
    first, second = wakes[0]
    assert (first.text, first.ids, first.finish) == ("abc", [7, 7, 7], END)
    assert first.logprobs is not None
    assert len(first.logprobs.chosen) == 3
    assert (second.text, second.index) == ("x", 1)
    assert not aborted


async def test_whole_gives_one_chunk_per_choice_in_order():
    output, _ = make_output(n=2)
    reader = asyncio.create_task(output.whole())
    await asyncio.sleep(0)
    output.put(chunk("x", END, index=1))
    output.put(chunk("a"))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(chunk("b", END))
    assert [c.text for c in await reader] == ["ab", "x"]


async def test_many_are_read_whole_without_a_task_for_each():
    outputs = [make_output()[0] for _ in range(5)]
    outputs[3].put(chunk("d", END))  # before a reader exists
    reader = asyncio.create_task(read_all(outputs))
    num_tasks = len(asyncio.all_tasks())
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == num_tasks
    for index in (4, 0, 2):
        outputs[index].put(chunk("abcde"[index], END))
    await asyncio.sleep(0)
    assert not reader.done()
    outputs[1].put(chunk("b", END))
    assert [c.text for [c] in await reader] == list("abcde")


@pytest.mark.parametrize("before", [True, False])
async def test_the_first_error_of_many_ends_all(before: bool):
    (first, aborted_first), (second, aborted_second) = make_output(), make_output()
    if before:
        second.fail(StepFailed("gone"))
    reader = asyncio.create_task(read_all([first, second]))
    await asyncio.sleep(0)
    second.fail(StepFailed("gone"))
    with pytest.raises(StepFailed, match="gone$"):
        await reader
    assert (len(aborted_first), aborted_second) == (1, [])


async def test_leaving_the_stream_early_aborts_the_request():
    output, aborted = make_output()
    output.put(chunk("a"))
    stream = output.chunks()
    await anext(stream)
    await stream.aclose()
    assert aborted == [output.request_id]


async def test_cancelled_reader_aborts_the_request():
    output, aborted = make_output()
    reader = asyncio.create_task(output.whole())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert aborted == [output.request_id]


async def test_failure_is_raised_to_the_reader():
    output, aborted = make_output()
    output.put(chunk("a"))
    output.fail(StepFailed("gone"))
    with pytest.raises(StepFailed, match="gone"):
        _ = [chunks async for chunks in output.chunks()]
    assert not aborted


async def test_reader_that_does_not_keep_up_is_aborted(monkeypatch: pytest.MonkeyPatch):
    bytes_of_a_chunk = 1 + output_stream_module.ID_BYTES + output_stream_module.LOGPROB_BYTES
    monkeypatch.setattr(output_stream_module, "MAX_UNREAD_BYTES", 10 * bytes_of_a_chunk)
    output, aborted = make_output()
    for _ in range(10):
        output.put(chunk("a"))
    output.put(chunk("a"))  # the chunk that exceeds the limit may be the only unread one, and large
    assert not aborted
    output.put(chunk("a"))
    assert aborted == [output.request_id]


async def test_a_reader_may_set_a_smaller_limit_and_one_large_chunk_passes_it():
    output, aborted = make_output()
    arrivals = output.chunks(None, 1000)
    output.put(chunk("a" * 5000))
    [first] = await anext(arrivals)
    assert (len(first.text), aborted) == (5000, [])
    for _ in range(3):
        output.put(chunk("a" * 600))
    assert aborted == [output.request_id]
    await arrivals.aclose()


async def test_an_output_that_is_read_whole_is_bounded_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_stream_module, "MAX_WHOLE_BYTES", 1000)
    for num, fails in ((5, False), (6, True)):
        output, aborted = make_output()
        reader = asyncio.create_task(output.whole())
        await asyncio.sleep(0)
        for _ in range(num):
            output.put(chunk("a" * (200 - output_stream_module.ID_BYTES))._replace(logprobs=None))
        assert bool(aborted) == fails
        output.put(chunk("", END, ids=()))
        if fails:
            with pytest.raises(InvalidRequest, match="stream it"):
                await reader
        else:
            assert len((await reader)[0].ids) == num


async def test_ids_and_logprobs_without_text_are_bounded_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_stream_module, "MAX_UNREAD_BYTES", 100_000)
    for wanted in (None, Logprobs([(-0.5, 7)] * 10, [[(-0.5, 7)] * 20] * 10, [])):
        output, aborted = make_output()
        limit = 100_000 // (10 * output_stream_module.ID_BYTES)
        if wanted is not None:
            limit //= 8  # 21 pairs per id
        for _ in range(limit + 2):
            output.put(chunk("", ids=(7,) * 10)._replace(logprobs=wanted))
        assert aborted[:1] == [output.request_id]


async def test_what_a_push_takes_wakes_nobody():
    output, aborted = make_output()
    taken: list[str] = []

    def push(chunk: Chunk) -> bool:
        taken.append(chunk.text)
        return chunk.text != "c"

    async def read() -> list[str]:
        return [chunk.text async for chunks in output.chunks(push) for chunk in chunks]

    output.put(chunk("a"))  # before a reader exists
    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    for text in ("b", "c", "d", "e"):  # `push` takes b but not c, and is not called again while c is unread
        output.put(chunk(text))
    await asyncio.sleep(0)
    output.put(chunk("f", END))
    assert await asyncio.wait_for(reader, 1) == ["a", "cde"]
    assert taken == ["b", "c", "f"]
    assert output.finished
    assert not aborted


async def test_a_choice_that_ends_by_a_push_ends_the_stream_with_the_last_one():
    output, aborted = make_output(n=2)

    async def read() -> list[list[Chunk]]:
        return [chunks async for chunks in output.chunks(lambda chunk: True)]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    output.put(chunk("a", END, index=1))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(chunk("b", END, index=0))
    assert await asyncio.wait_for(reader, 1) == []
    assert not aborted


async def test_what_a_push_raises_is_the_readers():
    output, aborted = make_output()

    def push(chunk: Chunk) -> bool:
        raise KeyError("mine")

    async def read() -> None:
        async for _ in output.chunks(push):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    output.put(chunk("a"))  # the writer continues
    with pytest.raises(KeyError, match="mine"):
        await reader
    assert aborted == [output.request_id]
