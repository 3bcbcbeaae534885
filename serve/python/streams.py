"""Combine the output streams of one or several prompts into one asynchronous iterator of pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from runtime.actors.output_stream import OutputStream
from runtime.request import Chunk, Request
from serve.background import background_tasks
from serve.calls.generate.answers import GenerateAnswers
from serve.python.results import Account, Piece

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


class Stream:
    """The pieces of a call: `async for piece in engine.generate(prompt, stream=True)`.

    As with SGLang's `async_generate`, the stream may be awaited before the loop; the result is the stream itself.
    Leaving the loop aborts the requests.
    """

    def __init__(self, pieces: AsyncGenerator[Piece, None]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        return self._pieces

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self
        yield  # never reached; makes this function a generator, which ends immediately

    async def aclose(self) -> None:
        """End the stream and abort its unfinished requests."""
        await self._pieces.aclose()


async def pieces_of(core: EngineCore, requests: Sequence[Request]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all outputs as they arrive. Closing the generator aborts the requests."""
    answers = [GenerateAnswers(core, [request], indexed=True) for request in requests]
    texts = [[""] * request.sampling.n for request in requests]
    streams = await core.submit_all(requests)
    for each, stream in zip(answers, streams, strict=True):
        each.follow([stream])
    page_size = core.plan.cache.page_size
    async with aclosing(_arrivals(streams)) as arrivals:
        async for number, chunks in arrivals:
            request = requests[number]
            for chunk in chunks:
                [values] = answers[number].whole([[chunk]])
                texts[number][chunk.index] += chunk.text
                index = number * request.sampling.n + chunk.index
                values |= {"delta": chunk.text, "text": texts[number][chunk.index], "index": index}
                cost = None
                if chunk.finish is not None:
                    cost = account_of(streams[number], values, page_size)
                yield Piece(values, prompt=request.text, account=cost)


def account_of(stream: OutputStream, values: dict[str, Any], page_size: int) -> Account | None:
    """Return the costs of a finished output, or None if the stream has no times (in tests)."""
    times = stream.times
    if times is None:
        return None
    return Account.of(times, values["meta_info"], times.ended or monotonic(), page_size)


async def _arrivals(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """Yield (index of a stream, its new chunks) as chunks arrive. Closes all streams at the end."""
    if len(streams) == 1:
        async with aclosing(streams[0].chunks()) as chunks:
            async for arrived in chunks:
                yield 0, arrived
        return
    ready: asyncio.Queue[tuple[int, list[Chunk]] | BaseException | None] = asyncio.Queue(1)

    async def read(number: int) -> None:
        try:
            async with aclosing(streams[number].chunks()) as chunks:
                async for arrived in chunks:
                    await ready.put((number, arrived))
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    num_open = len(streams)
    try:
        async with background_tasks(*(read(number) for number in range(num_open))):
            while num_open:
                arrival = await ready.get()
                if isinstance(arrival, BaseException):
                    raise arrival
                if arrival is None:
                    num_open -= 1
                else:
                    yield arrival
    finally:
        for stream in streams:
            stream.close()
