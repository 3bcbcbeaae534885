"""LoRA adapters by `model`, from the clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

import http_server
import tiny_models
from lora_adapters import adapter
from serve import Engine
from serve.server.app import build_app

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
LIMITS: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
Ask = Callable[[str, str], Awaitable[str | None]]  # (url, model) -> text


async def chat(url: str, model: str) -> str | None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model=model, messages=MESSAGES, **LIMITS)
        assert answer.model == model
        return answer.choices[0].message.content


async def streamed_chat(url: str, model: str) -> str | None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **LIMITS)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def response(url: str, model: str) -> str | None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.responses.create(model=model, input=MESSAGES, temperature=0, max_output_tokens=16)
        return answer.output_text


async def messages(url: str, model: str) -> str | None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        greedy = {"temperature": 0}  # not every version of the client has this argument
        answer = await client.messages.create(model=model, messages=MESSAGES, max_tokens=16, extra_body=greedy)
        return "".join(block.text for block in answer.content if block.type == "text")


async def ollama_chat(url: str, model: str) -> str | None:
    options = {"temperature": 0, "num_predict": 16}
    answer = await ollama.AsyncClient(host=url).chat(model=model, messages=MESSAGES, options=options)
    return answer.message.content


@pytest.mark.parametrize("ask", [chat, streamed_chat, response, messages, ollama_chat])
async def test_clients_choose_adapters_by_the_model(ask: Ask) -> None:
    base = tiny_models.cached()
    paths = [f"a={adapter(base, 1)}", f"b={adapter(base, 2)}"]
    async with (
        Engine(base, lora_paths=paths, served_model_name="tiny", random_seed=1) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        prompt = {"messages": MESSAGES, **LIMITS}
        wanted = {
            name: (await http.post("/v1/chat/completions", json={**prompt, "model": "tiny", "lora_path": name})).json()
            for name in ("a", "b", None)
        }
        texts = {name: answer["choices"][0]["message"]["content"] for name, answer in wanted.items()}
        assert len(set(texts.values())) == 3
        assert await ask(url, "a") == await ask(url, "tiny:a") == texts["a"]
        assert await ask(url, "b") == texts["b"]
        assert await ask(url, "tiny") == texts[None]
        served = {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}
        assert served == {"tiny": None, "a": "tiny", "b": "tiny"}
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError, ollama.ResponseError)):
            await ask(url, "c")
