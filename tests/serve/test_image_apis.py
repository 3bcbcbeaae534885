"""Images through every API, with the clients of these APIs, and images that nobody should send."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest

import http_server
import tiny_seeing
from runtime.errors import InvalidRequest
from serve import Engine
from serve.server.app import build_app
from tiny_seeing import picture, png

FAMILY = "llava"
PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32", "served_model_name": "x"}
GREEDY = {"temperature": 0.0, "max_tokens": 6}
PICTURE = png(picture(40, 30, 1))
OTHER = png(picture(40, 30, 2))
TEXT = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{TEXT}"
QUESTION = "What is it?"
CHAT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}},
                                     {"type": "text", "text": QUESTION}]}]  # fmt: skip


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Engine, str]]:
    engine = Engine(tiny_seeing.cached(FAMILY), **{**PLAIN, **options})
    async with engine, http_server.serving(build_app(engine.core)) as url:
        yield engine, url


def expected() -> str:
    """Return transformers' answer to `CHAT`, with the chat template."""
    path = tiny_seeing.cached(FAMILY)
    text = f"<|im_start|>user\n<image>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids, _ = tiny_seeing.reference(path, FAMILY, text, [picture(40, 30, 1)], 6)
    return tiny_seeing.processor_of(path, FAMILY).tokenizer.decode(ids, skip_special_tokens=True)


async def test_all_apis_give_the_answer_of_transformers() -> None:
    wanted = expected()
    async with served() as (engine, url):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chat = await client.chat.completions.create(model="x", messages=CHAT, **GREEDY)  # pyright: ignore
        assert chat.choices[0].message.content == wanted
        assert chat.usage is not None
        num_tokens = chat.usage.prompt_tokens
        parts: Any = [
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]
        response = await client.responses.create(
            model="x", input=[{"role": "user", "content": parts}], temperature=0.0, max_output_tokens=6
        )
        assert response.output_text == wanted
        blocks: Any = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
            {"type": "text", "text": QUESTION},
        ]
        messages: Any = [{"role": "user", "content": blocks}]
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        message = await claude.messages.create(
            model="x", max_tokens=6, messages=messages, extra_body={"temperature": 0.0}
        )
        assert message.content[0].text == wanted  # pyright: ignore
        counted = await claude.messages.count_tokens(model="x", messages=messages)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_tokens
        own = ollama.AsyncClient(host=url)
        options = {"temperature": 0.0, "num_predict": 6}
        said = await own.chat("x", [{"role": "user", "content": QUESTION, "images": [TEXT]}], options=options)
        assert said.message.content == wanted
        assert "vision" in ((await own.show("x")).capabilities or ())
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            sampling = {"temperature": 0.0, "max_new_tokens": 6}
            text = f"<|im_start|>user\n<image>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
            for image in (TEXT, URL, [URL], {"url": URL}):
                body = {"text": text, "image_data": image, "sampling_params": sampling}
                answer = (await http.post("/generate", json=body)).json()
                assert answer["text"] == wanted
            batch = {"text": [text, "Hello"], "image_data": [[URL], None], "sampling_params": sampling}
            answers = (await http.post("/generate", json=batch)).json()
            assert [len(each["output_ids"]) for each in answers] == [6, 6]
            assert answers[0]["text"] == wanted
            tokens = (await http.post("/tokenize", json={"messages": CHAT})).json()
            assert tokens["count"] == num_tokens
            body = {"input_ids": tokens_with_one_place(engine, text), "image_data": URL, "sampling_params": sampling}
            assert (await http.post("/generate", json=body)).json()["text"] == wanted
            assert (await http.get("/model_info")).json()["has_image_understanding"] is True
        media = engine.core.media
        assert media is not None
        assert media.cache.num_misses == 1, "one image, however it came"


def tokens_with_one_place(engine: Engine, text: str) -> list[int]:
    tokenizer = engine.core.tokenizer
    assert tokenizer is not None
    [ids] = tokenizer.encode_batch([text], add_special_tokens=False)
    return ids


async def test_images_from_python() -> None:
    wanted, image = expected(), picture(40, 30, 1)
    async with Engine(tiny_seeing.cached(FAMILY), **PLAIN) as engine:
        for part in (
            {"type": "image_url", "image_url": image},
            {"type": "image_url", "image_url": {"url": np.asarray(image)}},
            {"type": "image_url", "image_url": PICTURE},
            {"type": "image_url", "image_url": URL},
        ):
            chat = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
            answer = await engine.chat(chat, **GREEDY)
            assert answer.choices[0].message.content == wanted
        text = f"<|im_start|>user\n<image>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        sampling = {"temperature": 0.0, "max_new_tokens": 6}
        for given in (image, [np.asarray(image)], PICTURE):
            assert (await engine.generate(text, sampling, image_data=given))["text"] == wanted
        with pytest.raises(InvalidRequest, match="2 places for images"):
            await engine.generate(text + "<image>", sampling, image_data=image)
        with pytest.raises(InvalidRequest, match="array must be uint8"):
            await engine.generate(text, sampling, image_data=np.zeros((4, 4, 3), np.float64))


def bomb() -> bytes:
    """Return a PNG of a few KB whose pixels would take 30 GB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def data(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


HOSTILE = {
    "bomb": data(bomb()),
    "empty": "data:image/png;base64,",
    "no base64": "data:image/png;base64,@@@@",
    "cut base64": "data:image/png;base64," + TEXT[:-3],
    "not base64": "data:image/png,abc",
    "text": data(b"hello, I am an image"),
    "cut file": data(PICTURE[:60]),
    "svg": data(b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"),
    "postscript": data(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n/x {run} def"),
    "tiff": data(b"II*\x00\x08\x00\x00\x00" + bytes(64)),
    "metadata address": "http://169.254.169.254/latest/meta-data/",
    "own server": "http://127.0.0.1:{port}/health",
    "name of the own server": "http://localhost:{port}/health",
    "ipv6": "http://[::1]:{port}/health",
    "ftp": "ftp://example.org/x.png",
    "gopher": "gopher://127.0.0.1:25/x",
    "file": "file:///etc/passwd",
    "file of another host": "file://evil/etc/passwd",
    "javascript": "javascript:alert(1)",
    "user": "http://user:pass@example.org/x.png",
}


async def test_hostile_images_are_refused_and_harm_nobody() -> None:
    wanted = expected()
    async with served() as (engine, url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def ask(image: str) -> httpx.Response:
                content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
                body = {"model": "x", "messages": [{"role": "user", "content": content}], **GREEDY}
                return await http.post("/v1/chat/completions", json=body)

            port = url.rpartition(":")[2]
            images = [image.replace("{port}", port) for image in HOSTILE.values()]
            answers = await asyncio.gather(*(ask(image) for image in [URL, *images, URL]))
            good = [answers[0], *answers[-1:]]
            assert [each.json()["choices"][0]["message"]["content"] for each in good] == [wanted, wanted]
            for name, answer in zip(HOSTILE, answers[1:-1], strict=True):
                assert answer.status_code == 400, (name, answer.text)
                assert "messages.0.content.0" in answer.text, (name, answer.text)
            many = [{"type": "image_url", "image_url": {"url": URL}}] * 65
            body = {"model": "x", "messages": [{"role": "user", "content": many}], **GREEDY}
            refused = await http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400
            assert "at most 64" in refused.text
        await engine.core.drain()
        engine.core.check()


async def test_allowed_hosts_and_folders(tmp_path: Any) -> None:
    wanted = expected()
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(OTHER)
    (tmp_path / "open" / "link.png").symlink_to(tmp_path / "secret.png")

    async def files(scope: Any, receive: Any, send: Any) -> None:
        redirects = scope["path"] == "/redirect"
        headers = [(b"location", b"http://127.0.0.1/other.png")] if redirects else []
        await send({"type": "http.response.start", "status": 302 if redirects else 200, "headers": headers})
        await send({"type": "http.response.body", "body": PICTURE})

    options = {"allowed_media_domains": ["127.0.0.1", "*.example.org"],
               "allowed_local_media_path": str(tmp_path / "open")}  # fmt: skip
    async with http_server.serving(files, lifespan="off") as host, served(**options) as (_, url):  # noqa: SIM117
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            expectations = {
                f"{host}/a.png": True,
                f"{host}/redirect": False,
                host.replace("127.0.0.1", "localhost") + "/a.png": False,
                (tmp_path / "open" / "a.png").as_uri(): True,
                (tmp_path / "open" / "link.png").as_uri(): False,
                (tmp_path / "secret.png").as_uri(): False,
                (tmp_path / "open").as_uri() + "/../secret.png": False,
                (tmp_path / "open").as_uri(): False,
            }
            for image, is_allowed in expectations.items():
                content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
                body = {"model": "x", "messages": [{"role": "user", "content": content}], **GREEDY}
                answer = await http.post("/v1/chat/completions", json=body)
                assert (answer.status_code == 200) == is_allowed, (image, answer.text)
                if is_allowed:
                    assert answer.json()["choices"][0]["message"]["content"] == wanted


async def test_a_server_without_images_says_why() -> None:
    async with served(enable_multimodal=False) as (engine, url):
        assert engine.core.media is None
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            answer = await http.post("/v1/chat/completions", json={"model": "x", "messages": CHAT, **GREEDY})
            assert answer.status_code == 400
            assert "--enable-multimodal false" in answer.text
            text = [{"role": "user", "content": QUESTION}]
            answer = await http.post("/v1/chat/completions", json={"model": "x", "messages": text, **GREEDY})
            assert answer.status_code == 200


async def test_options_of_the_processor() -> None:
    family, question = "qwen2_vl", "What?"
    path, wide = tiny_seeing.cached(family), picture(64, 64, 1)
    chat = f"<|im_start|>user\n{tiny_seeing.FAMILIES[family].placeholder}{question}<|im_end|>\n<|im_start|>assistant\n"
    content = [{"type": "image_url", "image_url": wide}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    answers = {}
    async with Engine(path, **PLAIN) as engine:
        for most in (4096, 1024):
            ids, _ = tiny_seeing.reference(path, family, chat, [wide], 6, images_kwargs={"max_pixels": most})
            wanted = tiny_seeing.processor_of(path, family).tokenizer.decode(ids, skip_special_tokens=True)
            made = await engine.chat(messages, mm_processor_kwargs={"max_pixels": most}, **GREEDY)
            assert made.choices[0].message.content == wanted
            answers[most] = made.usage.prompt_tokens
        assert answers[1024] < answers[4096]
        assert engine.core.media is not None
        assert engine.core.media.cache.num_hits == 0, "the options belong to the key"
        for options, reason in (
            ({"size": {"height": 10**9}}, "size is not supported"),
            ({"max_pixels": 2**40}, "at most"),
            ({"min_pixels": True}, "must be a number"),
            ({"fps": 1.0}, "needs a video"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await engine.chat(messages, mm_processor_kwargs=options, **GREEDY)
    async with Engine(path, max_image_pixels=64 * 64, context_length=12, **PLAIN) as engine:
        assert engine.core.media is not None
        for least, reason in ((64 * 64 + 1, "enlarged to more than 4096 pixels"), (64 * 64, "context length")):
            options = {"min_pixels": least, "max_pixels": 2**14}
            with pytest.raises(InvalidRequest, match=reason):
                await engine.chat(messages, mm_processor_kwargs=options, **GREEDY)
        assert engine.core.media.encode_s == 0, "what cannot be served is not encoded"
    async with Engine(tiny_seeing.cached("llava"), **PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="no such option"):
            await engine.chat(messages, mm_processor_kwargs={"max_pixels": 64}, **GREEDY)
