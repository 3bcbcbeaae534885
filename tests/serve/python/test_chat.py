"""Chat from Python with the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pydantic
import pytest
import pytest_asyncio

from runtime.errors import InvalidRequest, RequestError
from serve import Engine, SyncEngine

HELLO = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as started:
        yield started


async def test_answer_is_a_dict_with_attributes(engine: Engine):
    answer = await engine.chat(HELLO, max_tokens=12, temperature=0)
    message = answer.choices[0].message
    assert message.content.startswith("Hello")
    assert answer["choices"][0]["message"]["content"] == message.content
    assert answer.usage.completion_tokens <= 12
    assert (await engine.chat("Hello", max_tokens=12, temperature=0)).choices[0].message == message
    with pytest.raises(AttributeError, match="has no 'choice'"):
        _ = answer.choice
    assert message.content in (answer._repr_html_() or "")
    assert answer.usage._repr_html_() is None
    message["content"] = "<b>"
    assert "&lt;b&gt;" in (answer._repr_html_() or "")


async def test_stream_put_together_is_the_answer(engine: Engine):
    whole = await engine.chat(HELLO, max_tokens=12, temperature=0)
    options = {"max_tokens": 12, "temperature": 0, "stream_options": {"include_usage": True}}
    pieces = [piece async for piece in engine.chat_stream(HELLO, **options)]
    text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_leaving_a_stream_frees_its_request(engine: Engine):
    pieces = engine.chat_stream(HELLO, ignore_eos=True)
    async for _ in pieces:
        break
    await pieces.aclose()
    while engine.status().num_requests:
        await engine.chat("Hello", max_tokens=1)


async def test_wrong_keywords_are_named(engine: Engine):
    for options, param in (
        ({"max_token": 3}, "max_token"),
        ({"temperature": -1}, "temperature"),
        ({"model": "other"}, "model"),
        ({"messages_": 1}, "messages_"),
    ):
        with pytest.raises(RequestError) as caught:
            await engine.chat(HELLO, **options)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="JSON types"):
        await engine.chat([{"role": "user", "content": object()}])


def test_code_without_await_chats_too():
    with SyncEngine() as engine:
        answer = engine.chat(HELLO, max_tokens=8, temperature=0)
        pieces = engine.chat_stream(HELLO, max_tokens=8, temperature=0)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == answer.choices[0].message.content


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


async def test_pydantic_model_gives_its_object(engine: Engine):
    whole = await engine.chat("Name a city.", response_format=City, max_tokens=60, seed=1)
    message = whole.choices[0].message
    assert message.parsed == City.model_validate_json(message.content)
    cut = await engine.chat("Name a city.", response_format=City, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.parsed) == ("length", None)
