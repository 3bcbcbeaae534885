"""Properties of streams: clients that disconnect, read slowly, or come in pairs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

import fake_core
from runtime.request import Chunk, LogprobParams, Request
from runtime.tokenizer.tokenizer import Tokenizer
from serve.http.body_writer import BODY_WRITER
from serve.http.errors import NATIVE
from serve.http.sse import DONE, PING, EventStream
from served_core import Serve, Served

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 200}),
    ("/v1/completions", {"prompt": ["Hello", "you"], "n": 2, "max_tokens": 200}),
    ("/generate", {"text": "Hello"}),
]


async def until(state: Callable[[], bool]) -> None:
    while not state():
        await asyncio.sleep(0)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_client_that_leaves_a_stream_aborts_it(serve: Serve, path: str, body: dict[str, Any]) -> None:
    served = await serve(held=True)
    async with contextlib.AsyncExitStack() as stack:
        opening = asyncio.create_task(
            stack.enter_async_context(served.http.stream("POST", path, json={**body, "stream": True}))
        )
        await until(lambda: served.core.num_open > 0)
        served.core.step()
        response = await opening
        async for _ in response.aiter_bytes():
            break
    await until(lambda: served.core.num_open == 0)
    assert sorted(served.core.aborted) == [request.id for request in served.core.submitted]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletionChunk),
        ("/v1/completions", {"prompt": ["Hello", "you"], "n": 2, "max_tokens": 200}, Completion),
        ("/api/chat", {"messages": CHAT["messages"]}, None),
    ],
)
async def test_aborted_answer_ends_with_an_error_that_clients_know(
    serve: Serve, path: str, body: dict[str, Any], answer: type[BaseModel] | None
) -> None:
    served = await serve(held=True)
    for stream in (True, False):
        posted = asyncio.create_task(served.http.post(path, json={"model": fake_core.MODEL, **body, "stream": stream}))
        await until(lambda: served.core.num_open > 0)
        served.core.step()
        await asyncio.sleep(0)
        served.core.abort_all()
        response = await posted
        if not stream:
            assert (response.status_code, "The request was aborted." in response.text) == (400, True)
            continue
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith(("data", "{"))]
        *events, last = [orjson.loads(line) for line in lines if line != "[DONE]"]
        assert "The request was aborted." in str(last["error"])
        assert events
        for event in events:
            if answer is Completion:  # its type does not allow the null that OpenAI's API sends
                assert [choice["finish_reason"] for choice in event["choices"]] == [None]
                event["choices"][0]["finish_reason"] = "stop"
            if answer is not None:
                answer.model_validate(event, strict=True)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_the_first_token_aborts(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    served = await serve(held=True)
    asked = asyncio.create_task(served.http.post(path, json={**body, "stream": stream}))
    await until(lambda: served.core.num_open > 0)
    asked.cancel()
    await until(lambda: served.core.num_open == 0)
    assert sorted(served.core.aborted) == [request.id for request in served.core.submitted]


async def test_finished_requests_are_not_aborted(served: Served) -> None:
    for path, body in BODIES:
        for stream in (False, True):
            await served.http.post(path, json={**body, "stream": stream})
    assert served.core.aborted == []
    assert served.core.num_open == 0


async def test_two_streams_do_not_mix(serve: Serve) -> None:
    texts = {"one": "Every morning the engine woke.", "two": "Ein kleiner Ofen wärmt die Küche."}
    served = await serve(
        ids_of=lambda request, index: served.core.tokenizer.encode_batch([texts[request.text or ""]])[0]
    )
    first, second = await asyncio.gather(
        *(served.events("/v1/completions", prompt=prompt, max_tokens=200) for prompt in texts)
    )
    joined = ["".join(event["choices"][0]["text"] for event in events) for events in (first, second)]
    assert joined == list(texts.values())


async def test_tokens_arrive_as_they_are_made(serve: Serve) -> None:
    served = await serve(held=True)
    request = served.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True})
    async with contextlib.AsyncExitStack() as stack:
        opening = asyncio.create_task(stack.enter_async_context(request))
        await until(lambda: served.core.num_open > 0)
        served.core.step()
        frames = (await opening).aiter_lines()
        for expected in ("On", "ce", " "):
            line = await anext(frames)
            assert orjson.loads(line.removeprefix("data: "))["choices"][0]["text"] == expected
            await anext(frames)
            served.core.step()


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_failure_in_the_middle_is_told_in_the_stream(serve: Serve, path: str, body: dict[str, Any]) -> None:
    served = await serve(held=True)
    async with contextlib.AsyncExitStack() as stack:
        opening = asyncio.create_task(
            stack.enter_async_context(served.http.stream("POST", path, json={**body, "stream": True}))
        )
        await until(lambda: served.core.num_open > 0)
        served.core.step()
        response = await opening
        served.core.failure = fake_core.broken_step()
        served.core.step()
        text = "".join([part async for part in response.aiter_text()])
    *_, error, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert orjson.loads(error.removeprefix("data: "))["error"]["message"] == "A step failed."


class Sent:
    """An ASGI client that records its messages. While `gate` is closed, it does not read."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.messages.append(message)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


class Plain:
    """An encoder whose events are plain text."""

    def events(self, request_index: int, chunks: Any) -> bytes:
        return b"".join(chunk.text.encode() for chunk in chunks)

    def closing(self) -> bytes:
        return b""


class Direct:
    """A body writer that writes to the same list."""

    def __init__(self, client: Sent) -> None:
        self._client = client
        self.ready = True
        self.num_pieces = 0

    def write(self, piece: bytes) -> None:
        assert self.ready
        self.num_pieces += 1
        self._client.messages.append({"type": "http.response.body", "body": piece})


def open_stream(
    core: fake_core.FakeCore,
    client: Sent,
    num_requests: int = 1,
    writer: Direct | None = None,
    **options: Any,
) -> asyncio.Task[None]:
    replies = [core.submit(Request(text="a")) for _ in range(num_requests)]
    stream = EventStream(replies, Plain(), NATIVE, **options)
    scope: dict[str, Any] = {"type": "http", BODY_WRITER: writer}
    return asyncio.create_task(stream(scope, client.receive, client.send))


async def test_silence_is_broken_by_comments(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    task = open_stream(core, client, ping_s=0.01)
    await asyncio.sleep(0.05)
    assert client.messages == []  # before a stream begins, it may still become an error
    core.step()
    await until(lambda: client.bodies[1:3] == [PING, PING])
    client.gone.set()
    await task
    assert core.num_open == 0


async def test_slow_reader_gets_what_has_come_at_once(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    task = open_stream(core, client)
    core.step()
    await until(lambda: len(client.bodies) == 1)
    client.gate.clear()
    for _ in range(10):
        core.step()
        await asyncio.sleep(0)
    client.gate.set()
    await until(lambda: len(client.bodies) == 3)
    assert b"".join(client.bodies).decode() == fake_core.TEXT[: len(b"".join(client.bodies))]
    client.gone.set()
    await task


async def test_chunks_are_written_at_once_while_the_client_keeps_up(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    writer = Direct(client)
    task = open_stream(core, client, writer=writer)
    await asyncio.sleep(0)
    core.step()
    await until(lambda: len(client.bodies) == 1)  # the first event is sent with the head, by the ordinary path
    assert writer.num_pieces == 0
    await asyncio.sleep(0)
    for number in range(2, 6):
        core.step()  # the event loop does not run in between
        assert len(client.bodies) == number
    assert writer.num_pieces == 4
    writer.ready = False
    for _ in range(3):
        core.step()
    assert len(client.bodies) == 5
    writer.ready = True
    core.step()  # is merged with the waiting events
    assert len(client.bodies) == 5
    await until(lambda: len(client.bodies) == 6)
    await asyncio.sleep(0)
    core.step()
    assert writer.num_pieces == 5
    assert b"".join(client.bodies).decode() == fake_core.TEXT[: len(b"".join(client.bodies))]
    while core.num_open:
        core.step()
        await asyncio.sleep(0)
    await task
    assert b"".join(client.bodies).decode() == fake_core.TEXT + DONE.decode()
    assert core.aborted == []


@pytest.mark.parametrize("keeps_up", [True, False])
async def test_encoder_is_used_by_one_thread_at_a_time(tokenizer: Tokenizer, keeps_up: bool) -> None:
    """A thread encodes prompt logprobs while chunks of the response's other requests arrive."""
    in_thread, may_leave = threading.Event(), threading.Event()

    class Exclusive(Plain):
        entered = overlapped = False

        def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
            self.overlapped = self.overlapped or self.entered
            self.entered = True
            if threading.current_thread() is not threading.main_thread():
                in_thread.set()
                assert may_leave.wait(10)
            self.entered = False
            return super().events(request_index, chunks)

    core, client, encoder = fake_core.FakeCore(tokenizer, held=True), Sent(), Exclusive()
    writer = Direct(client)
    writer.ready = keeps_up
    streams = [core.submit(Request(text="a"))]
    response = EventStream(streams, encoder, NATIVE)
    task = asyncio.create_task(response({"type": "http", BODY_WRITER: writer}, client.receive, client.send))
    streams += [core.submit(Request(text="a", logprobs=LogprobParams(start=0)))]
    await asyncio.sleep(0)
    core.step()
    await until(in_thread.is_set)
    for _ in range(5):
        core.step()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not encoder.overlapped
    may_leave.set()
    while core.num_open:
        core.step()
        await asyncio.sleep(0)
    await task
    assert not encoder.overlapped
    assert sorted(b"".join(client.bodies).decode()) == sorted(2 * fake_core.TEXT + DONE.decode())


async def test_nothing_overtakes_what_is_being_sent(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    writer = Direct(client)
    task = open_stream(core, client, writer=writer)
    await asyncio.sleep(0)
    client.gate.clear()
    for _ in range(4):
        core.step()
        await asyncio.sleep(0)
    assert client.messages == []
    assert writer.num_pieces == 0
    client.gate.set()
    while core.num_open:
        core.step()
        await asyncio.sleep(0)
    await task
    assert b"".join(client.bodies).decode() == fake_core.TEXT + DONE.decode()


async def test_error_of_an_encoder_in_the_middle_ends_its_stream_alone(tokenizer: Tokenizer) -> None:
    class Broken(Plain):
        num_events = 0

        def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
            self.num_events += 1
            if self.num_events == 3:
                raise KeyError("inside")
            return super().events(request_index, chunks)

    core, client, other = fake_core.FakeCore(tokenizer, held=True), Sent(), Sent()
    stream = EventStream([core.submit(Request(text="a"))], Broken(), NATIVE)
    scope = {"type": "http", BODY_WRITER: Direct(client)}
    broken = asyncio.create_task(stream(scope, client.receive, client.send))
    sound = open_stream(core, other, writer=Direct(other))
    while core.num_open:
        core.step()
        await asyncio.sleep(0)
    await asyncio.gather(broken, sound)
    text = b"".join(client.bodies)
    assert text.endswith(DONE)
    assert b"error" in text
    assert b"inside" not in text
    assert len(core.aborted) == 1
    assert b"".join(other.bodies).decode() == fake_core.TEXT + DONE.decode()


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_client_that_was_never_there_leaves_nothing(tokenizer: Tokenizer, num_requests: int) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    client.gone.set()
    await open_stream(core, client, num_requests)
    assert core.num_open == 0
    assert client.messages == []


async def test_cancelled_server_task_closes_the_reply(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    task = open_stream(core, client)
    core.step()
    await until(lambda: bool(client.bodies))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core.num_open == 0


async def test_broken_connection_ends_the_stream_quietly(tokenizer: Tokenizer) -> None:
    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    task = open_stream(core, client)
    core.step()
    await until(lambda: bool(client.bodies))

    async def broken(message: Any) -> None:
        raise OSError("gone")

    client.send = broken  # type: ignore[method-assign]
    client.gone.set()
    core.step()
    await task
    assert core.num_open == 0


async def test_error_of_an_encoder_is_ours(tokenizer: Tokenizer) -> None:
    class Broken(Plain):
        def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
            raise KeyError("inside")

    core, client = fake_core.FakeCore(tokenizer, held=True), Sent()
    stream = EventStream([core.submit(Request(text="a"))], Broken(), NATIVE)
    core.step()
    await stream({"type": "http"}, client.receive, client.send)
    assert client.messages[0]["status"] == 500
    assert b"inside" not in client.bodies[0]
    assert core.num_open == 0


async def test_ten_thousand_events_leave_no_task_behind(served: Served) -> None:
    before = len(asyncio.all_tasks())
    async with httpx.AsyncClient(base_url=served.url) as client:
        for _ in range(5):
            await asyncio.gather(*(client.post("/generate", json={"text": "a", "stream": True}) for _ in range(10)))
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert served.core.num_open == 0


async def test_requests_leave_nothing_to_the_garbage_collector(served: Served) -> None:
    """The garbage collector runs rarely, while bodies may be large."""

    def num_cycles() -> int:
        return sum(type(thing) is RequestResponseCycle for thing in gc.get_objects())

    gc.collect()
    before = num_cycles()
    gc.disable()
    try:
        for path, body in BODIES:
            for stream in (False, True):
                response = await served.http.post(path, json={**body, "stream": stream})
                assert response.status_code == 200
        await until(lambda: num_cycles() <= before + 1)  # the cycle of the connection, which stays open
    finally:
        gc.enable()
