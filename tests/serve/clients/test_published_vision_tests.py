"""Rewritten forms of SGLang's and vLLM's published vision API tests, with the openai client and a tiny random model.

A random model's answers mean nothing. Where the published tests look for words in an answer, these tests compare the
prompt's tokens with those of transformers' processor, and answers with each other.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from PIL import Image

import http_server
import tiny_films
import tiny_seeing
from serve import Engine
from serve.server.app import build_app
from serve.server.connection import Connection
from tiny_seeing import HAS_TORCHVISION, picture, png

FAMILY, MODEL = "qwen2_vl", "x"
MAX_IMAGES = 3
PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 8192, "dtype": "float32", "served_model_name": MODEL}
LIMITS = {"image": MAX_IMAGES, "video": 1, "audio": 1}
OPTIONS: dict[str, Any] = {**PLAIN, "limit_mm_per_prompt": LIMITS, "allowed_media_domains": ["127.0.0.1"]}
NUM_NEW = 10
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_completion_tokens": NUM_NEW, "extra_body": {"ignore_eos": True}}
QUESTION = "What's in this image?"
NEEDS_AV = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="files of videos and audio need PyAV")


@cache
def pictures() -> tuple[Image.Image, ...]:
    """Pictures of different sizes: RGB, gray, with a palette, and with transparency."""
    sizes = ((40, 30), (24, 48), (56, 24), (32, 32))
    made = [picture(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    return made[0], made[1].convert("L"), made[2].convert("P"), made[3].convert("RGBA")


def data_url(number: int) -> str:
    """Return a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(pictures()[number])).decode()}"


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text(words: str = QUESTION) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def prompt_ids(messages: Sequence[Any], numbers: Sequence[int]) -> list[int]:
    """Return the tokens of a chat about these pictures, from transformers' template and processor."""
    processor = tiny_seeing.processor_of(tiny_seeing.cached(FAMILY), FAMILY)
    plain = [
        {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    rendered = processor.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    shown = [pictures()[number].convert("RGB") for number in numbers]
    return processor(text=[rendered], **({"images": shown} if shown else {}))["input_ids"][0]


class Server(NamedTuple):
    """A server of a vision-language model, its client, and the base URL of the pictures."""

    client: openai.AsyncOpenAI
    host: str
    url: str
    engine: Engine

    async def chat(self, *messages: Any, **fields: Any) -> Any:
        return await self.client.chat.completions.create(model=MODEL, messages=list(messages), **{**GREEDY, **fields})

    async def refused(self, *parts: Any, **fields: Any) -> openai.BadRequestError:
        """Return the error of a chat with these parts."""
        with pytest.raises(openai.BadRequestError) as caught:
            await self.chat(user(*parts, text()), **fields)
        return caught.value


async def picture_host(scope: Any, receive: Any, send: Any) -> None:
    """Serve a picture: the path of the URL is its number."""
    content = png(pictures()[int(scope["path"].strip("/"))])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"image/png")]})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def served(family: str = FAMILY, **options: Any) -> AsyncIterator[Server]:
    async with (
        http_server.serving(picture_host, lifespan="off") as host,
        Engine(tiny_seeing.cached(family), **{**OPTIONS, **options}) as engine,
        http_server.serving(build_app(engine.core), http=Connection) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(client, host, url, engine)
        await engine.core.drain()
        engine.core.check()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as made:
        yield made


def content_of(answer: Any) -> str:
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    return choice.message.content


def check_usage(answer: Any, num_prompt: int) -> None:
    """Check the fields that both servers' tests read."""
    assert answer.id
    assert answer.created
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == NUM_NEW
    assert answer.usage.total_tokens == num_prompt + NUM_NEW
    assert answer.choices[0].finish_reason == "length"


async def test_one_image_and_a_second_turn(server: Server) -> None:
    """Follow `test_single_chat_session_image` of vLLM and `test_single_image_chat_completion` of SGLang."""
    answers = set()
    for number in range(len(pictures())):
        messages: list[Any] = [user(image(data_url(number)), text())]
        by_data = await server.chat(*messages, logprobs=True, top_logprobs=5)
        by_http = await server.chat(user(image(f"{server.host}/{number}"), text()), logprobs=True, top_logprobs=5)
        for answer in (by_data, by_http):
            check_usage(answer, len(prompt_ids(messages, [number])))
            entries = answer.choices[0].logprobs.content
            assert [len(entry.top_logprobs) for entry in entries] == [5] * NUM_NEW
        assert content_of(by_data) == content_of(by_http)
        answers.add(tuple(entry.logprob for entry in by_data.choices[0].logprobs.content))
        messages.append({"role": "assistant", "content": content_of(by_data)})
        messages.append({"role": "user", "content": "express your result in json"})
        check_usage(await server.chat(*messages), len(prompt_ids(messages, [number])))
    assert len(answers) == len(pictures()), "each picture changes the answer"


async def test_several_turns_with_images_in_any_order(server: Server) -> None:
    """Follow `test_multi_turn_chat_completion` and `test_multi_images_chat_completion` of SGLang."""
    first, second = (image(data_url(number), modalities="multi-images") for number in (0, 1))
    repeat = [
        {"role": "assistant", "content": [text("There is a man at the back of a cab.")]},
        user(text("Repeat your previous answer.")),
    ]
    chats: list[tuple[list[Any], list[int]]] = [
        ([user(first, text()), *repeat], [0]),
        ([user(first, text()), *repeat, user(text("And this?"), second)], [0, 1]),
        ([{"role": "system", "content": "Be kind."}, user(text("Describe this image."), first)], [0]),
        ([user(first, second, text())], [0, 1]),
        ([user(second, first, text())], [1, 0]),
        ([user(first, text("then"), second, text())], [0, 1]),
        ([user(text(), first, first)], [0, 0]),
    ]
    seen = set()
    for messages, numbers in chats:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = await server.chat(*messages, extra_body=extra, logprobs=True)
        wanted = prompt_ids(messages, numbers)
        check_usage(answer, len(wanted))
        assert answer.prompt_token_ids == wanted
        seen.add(tuple(entry.logprob for entry in answer.choices[0].logprobs.content))
    assert len(seen) == len(chats)


async def test_detail_and_ids_of_images_change_nothing(server: Server) -> None:
    """Follow `test_completions_with_image_with_uuid` of vLLM, except that an id alone is refused.

    vLLM answers about the image that had the id before. Here, no id from a client is trusted.
    """
    wanted = await server.chat(user(image(data_url(0)), text()))
    other = await server.chat(user(image(data_url(1)), text()))
    assert wanted.usage != other.usage
    for detail in ("auto", "low", "high"):
        given = {"type": "image_url", "image_url": {"url": data_url(0), "detail": detail}}
        assert content_of(await server.chat(user(given, text()))) == content_of(wanted)
    for number, same in ((0, wanted), (1, other)):
        answer = await server.chat(user(image(data_url(number), uuid="one id"), text()))
        assert content_of(answer) == content_of(same)
        assert answer.usage.prompt_tokens == same.usage.prompt_tokens
    for nothing in ({}, None):
        for uuid in ("one id", "not seen before"):
            error = await server.refused({"type": "image_url", "image_url": nothing, "uuid": uuid})
            assert "a uuid alone is no image" in error.message
    strange = {"type": "image_url", "image_url": {"url": data_url(0), "wrong_key": "a"}, "also_wrong": "b"}
    assert content_of(await server.chat(user(strange, text()))) == content_of(wanted)


async def test_images_in_constrained_chats(server: Server) -> None:
    """Follow `test_regex` of SGLang, with a JSON schema too."""
    pattern = r'\{\n   "color":"[\w]{1,8}",\n   "number_of_cars":[\d]{1,3}\n\}'
    shown = user(image(data_url(0)), text("Describe this image in the JSON format."))
    answer = await server.chat(shown, max_completion_tokens=200, extra_body={"regex": pattern})
    assert re.fullmatch(pattern, content_of(answer))
    found = json.loads(content_of(answer))
    assert isinstance(found["color"], str)
    assert isinstance(found["number_of_cars"], int)
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "cars": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["color", "cars"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "cars", "schema": schema, "strict": True}}
    answer = await server.chat(shown, max_completion_tokens=200, extra_body={}, response_format=form)
    found = json.loads(content_of(answer))
    assert found["color"] in ("red", "blue")
    assert 0 <= found["cars"] <= 99


async def test_images_and_text_at_once(server: Server) -> None:
    """Follow `test_mixed_batch` of SGLang."""
    chats = [
        user(image(data_url(0)), text()),
        user(image(data_url(1)), text()),
        user(text()),
        user(image(data_url(1)), image(data_url(0)), text()),
    ]
    alone = [await server.chat(chat, logprobs=True) for chat in chats]
    together = await asyncio.gather(*(server.chat(chat, logprobs=True) for chat in chats * 4))
    for found, wanted in zip(together, itertools.cycle(alone)):
        assert content_of(found) == content_of(wanted)
        assert found.usage.total_tokens == wanted.usage.total_tokens
        logprobs = [[entry.logprob for entry in each.choices[0].logprobs.content] for each in (found, wanted)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


async def test_streams_equal_whole_answers(server: Server) -> None:
    """Follow `test_chat_streaming_image` of vLLM."""
    messages = [user(image(data_url(0)), image(data_url(1)), text())]
    whole = await server.chat(*messages)
    stream = await server.chat(*messages, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == content_of(whole)
    assert {choice.delta.role for choice in choices} <= {"assistant", None}
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    assert reasons == [choices[-1].finish_reason] == [whole.choices[0].finish_reason]
    [usage] = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == NUM_NEW


async def test_several_choices_of_an_image(server: Server) -> None:
    """Follow `test_single_chat_session_image_beamsearch` of vLLM with sampling. Beam search is refused by name."""
    shown = user(image(data_url(0)), text())
    made = await server.chat(shown, n=2, temperature=1.0, seed=7, logprobs=True, top_logprobs=5)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].message.content != made.choices[1].message.content
    assert made.usage.completion_tokens == 2 * NUM_NEW
    assert made.usage.prompt_tokens == len(prompt_ids([shown], [0])), "the image counts once"
    twice = await server.chat(shown, n=2)
    assert twice.choices[0].message.content == twice.choices[1].message.content
    error = await server.refused(image(data_url(0)), n=2, extra_body={"use_beam_search": True})
    assert "use_beam_search" in error.message


async def test_refused_images_and_a_server_that_works_afterwards(server: Server) -> None:
    """Follow `test_multi_image_input` and `test_error_on_invalid_image_url_type` of vLLM."""
    wanted = content_of(await server.chat(user(image(data_url(0)), text())))
    most = [image(data_url(0))] * MAX_IMAGES
    check_usage(await server.chat(user(*most, text())), len(prompt_ids([user(*most, text())], [0] * MAX_IMAGES)))
    error = await server.refused(*most, image(data_url(1)))
    assert f"at most {MAX_IMAGES} are accepted (--limit-mm-per-prompt)" in error.message
    assert error.param == f"messages.0.content.{MAX_IMAGES}.image_url"
    other_host = server.host.replace("127.0.0.1", "localhost")
    beginning = "data:image/png;base64,"
    for part, reason in (
        (image(f"{beginning}@@@@"), "base64"),
        (image(data_url(0)[:-3]), "base64"),
        (image(f"{beginning}{base64.b64encode(b'words').decode()}"), "no image that can be read|not an image"),
        (image(f"{other_host}/0"), "does not fetch from this host"),
        (image("http://169.254.169.254/latest"), "does not fetch from this host"),
        (image("/etc/passwd"), "base64"),
        (image("/etc/cat.png"), "--allowed-local-media-path"),
        (image("file:///etc/passwd"), "--allowed-local-media-path"),
        ({"type": "image_url"}, "is required"),
        ({"type": "image_url", "image_url": {}}, "url is required"),
        ({"type": "image_url", "image_url": 3}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url"),
        (image(data_url(0), modalities="video"), 'modalities "video" is not supported'),
        (image(data_url(0), modalities="smell"), "modalities"),
    ):
        error = await server.refused(part)
        assert re.search(reason, error.message), (part, error.message)
        assert (error.param or "").startswith("messages.0.content.0"), (part, error.message)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        native = {"text": "Hello", "image_data": [data_url(0)], "modalities": ["video"]}
        answer = await http.post("/generate", json=native)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "modalities"
    completed = await server.client.completions.create(model=MODEL, prompt=[0] * 5, max_tokens=5, temperature=0.0)
    assert isinstance(completed.choices[0].text, str)
    assert content_of(await server.chat(user(image(data_url(0)), text()))) == wanted


async def test_paths_of_the_server(tmp_path: Path) -> None:
    """Follow the tests of SGLang that send the path of a downloaded file as a URL."""
    folder = tmp_path / "open"
    folder.mkdir()
    for file in (folder / "cat.png", tmp_path / "secret.png"):
        file.write_bytes(png(pictures()[0]))
    async with served(allowed_local_media_path=str(folder)) as server:
        wanted = await server.chat(user(image(data_url(0)), text()))
        found = await server.chat(user(image(str(folder / "cat.png")), text()))
        assert content_of(found) == content_of(wanted)
        assert found.usage.prompt_tokens == wanted.usage.prompt_tokens
        for path in (tmp_path / "secret.png", folder / ".." / "secret.png", folder / "none.png"):
            assert (await server.refused(image(str(path)))).param == "messages.0.content.0.image_url"


async def test_frames_in_whole_and_in_chunks() -> None:
    """Follow `test_chunked_prefill` and `test_video_images_chat_completion` of SGLang: frames of a film as images."""

    def frame(number: int) -> str:
        file = io.BytesIO()
        Image.fromarray(tiny_films.film(10, 40, 32)[number]).save(file, "JPEG")
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

    frames = [frame(number) for number in range(10)]
    counts = (1, 2, 6, 8, 10)
    found = []
    for chunk in (16, -1):
        options = {"chunked_prefill_size": chunk, "limit_mm_per_prompt": {"image": 10}}
        async with served(**options) as server, httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def generate(count: int, http: httpx.AsyncClient = http) -> Any:
                places = tiny_seeing.FAMILIES[FAMILY].placeholder * count
                sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True, "no_stop_trim": True,
                            "skip_special_tokens": False}  # fmt: skip
                body = {
                    "text": f"<|im_start|>user\n{places}Describe it.<|im_end|>\n<|im_start|>assistant\n",
                    "image_data": frames[:count],
                    "modalities": ["multi-images"],
                    "sampling_params": sampling,
                }
                answer = await http.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            answers = await asyncio.gather(*(generate(count) for count in counts))
            shown = [image(url, modalities="image") for url in frames]
            chat = await server.chat(user(*shown, text("Describe it.")))
            assert chat.usage.prompt_tokens == answers[-1]["meta_info"]["prompt_tokens"]
            assert chat.usage.completion_tokens == NUM_NEW
            found.append([each["output_ids"] for each in answers])
    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]}) > 1


@NEEDS_AV
@pytest.mark.skipif(not HAS_TORCHVISION, reason="transformers' video processors need torchvision")
async def test_videos() -> None:
    """Follow vLLM's tests of `video_url`."""
    film = base64.b64encode(tiny_films.film_file(tiny_films.film(8, 32, 32), 8)).decode()
    await check_one_and_too_many({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{film}"}}, FAMILY)


@NEEDS_AV
async def test_audio() -> None:
    """Follow vLLM's tests of `audio_url` and `input_audio`."""
    sound = base64.b64encode(tiny_films.wave_file(tiny_films.tone(0.8))).decode()
    parts = (
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{sound}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    )
    await check_one_and_too_many(parts[0], "qwen2_audio", parts[1])


async def check_one_and_too_many(part: Any, family: str, *others: Any) -> None:
    """Check a chat with a video or audio, its next turn and its stream, and that two such parts are refused.

    `others` are further forms of the same part.
    """
    async with served(family) as server:
        messages: list[Any] = [user(part, text())]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            counted = (await http.post("/tokenize", json={"model": MODEL, "messages": messages})).json()["count"]
            bare = (await http.post("/tokenize", json={"model": MODEL, "messages": [user(text())]})).json()["count"]
        assert counted > bare + 2, "the tokens of the part are counted"
        whole = await server.chat(*messages, logprobs=True, top_logprobs=5)
        check_usage(whole, counted)
        for other in others:
            assert content_of(await server.chat(user(other, text()))) == content_of(whole)
        stream = await server.chat(*messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == content_of(whole)
        messages.append({"role": "assistant", "content": content_of(whole)})
        messages.append({"role": "user", "content": "express your result in json"})
        again = await server.chat(*messages)
        assert again.usage.prompt_tokens > whole.usage.total_tokens
        error = await server.refused(part, part)
        assert "at most 1 are accepted (--limit-mm-per-prompt)" in error.message
        error = await server.refused({"type": part["type"], part["type"]: {}})
        assert "url is required" in error.message
        completed = await server.client.completions.create(model=MODEL, prompt=[0] * 5, max_tokens=5, temperature=0.0)
        assert isinstance(completed.choices[0].text, str)
