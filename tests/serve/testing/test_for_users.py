"""What people need to test their own programs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from runtime.errors import InvalidRequest
from serve import http_server, testing

ROOT = Path(__file__).parents[3]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_client_reaches_every_route_without_sockets() -> None:
    async with testing.engine() as engine, testing.client(engine) as http:
        assert (await http.get("/health")).status_code == 200
        answer = await http.post("/generate", json={"text": "Once", "sampling_params": {"temperature": 0}})
        assert answer.json()["text"] == (await engine.generate("Once", temperature=0)).text
        wrong = await http.post("/generate", json={"text": "Once", "sampling_params": {"temperature": -1}})
        assert wrong.status_code == 400
        streamed = await http.post("/v1/completions", json={"prompt": "Once", "stream": True, "model": "default"})
        assert streamed.text.endswith("data: [DONE]\n\n")


async def test_openai_client_with_scripted_answers() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with testing.openai_client(says=[call, "It rains in Oslo."]) as official:
        messages = [{"role": "user", "content": "The weather in Oslo?"}]
        first = await official.chat.completions.create(model="default", messages=messages, tools=[WEATHER])
        [tool_call] = first.choices[0].message.tool_calls
        assert tool_call.function.name == "get_weather"
        assert json.loads(tool_call.function.arguments) == {"city": "Oslo"}
        second = await official.chat.completions.create(model="default", messages=messages)
        assert second.choices[0].message.content == "It rains in Oslo."
        pieces = await official.chat.completions.create(model="default", messages=messages, stream=True)
        text = "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])
        assert text == "It rains in Oslo."


async def test_model_says_a_given_text() -> None:
    async with testing.engine() as engine:
        answer = await engine.generate("Hello", on_logits=testing.says(engine, "A text of mine."))
        assert (answer.text, answer.finish_reason) == ("A text of mine.", "stop")


async def test_an_engine_and_options_exclude_each_other() -> None:
    async with testing.engine() as engine:
        with pytest.raises(InvalidRequest, match="not both"):
            async with testing.client(engine, page_size=4):
                pass
    with pytest.raises(InvalidRequest, match="says"):
        async with testing.client(says=[]):
            pass


def test_pytest_plugin_gives_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_sync(penstock):\n"
        "    assert penstock.generate('Once', max_new_tokens=3).output_ids\n"
        "async def test_http(penstock_client):\n"
        "    async with penstock_client as http:\n"
        "        assert (await http.get('/health')).status_code == 200\n"
        "async def test_engine(penstock_engine):\n"
        "    async with penstock_engine as engine:\n"
        "        assert (await engine.generate('Once', max_new_tokens=3)).output_ids\n"
    )
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "asyncio_mode=auto",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100)
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr


def test_plugin_imports_nothing_until_a_fixture_is_used() -> None:
    code = "import sys, serve.testing.plugin; print([name for name in sys.modules if name in ('torch', 'httpx')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert ran.stdout.strip() == "[]", ran.stdout


async def test_server_beside_an_engine_that_python_uses() -> None:
    tasks = asyncio.all_tasks()
    async with testing.engine() as engine:
        expected = (await engine.generate("Once", temperature=0)).text
        body = {"text": "Once", "sampling_params": {"temperature": 0}}
        async with http_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/generate", json=body)).json()["text"] == expected
        server = await engine.serve()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
        await server.stop()
        assert (await engine.generate("Once", temperature=0)).text == expected
        left = await http_server(engine)  # ends with the engine
    await left.stop()
    while asyncio.all_tasks() != tasks:
        await asyncio.sleep(0.01)
    with testing.sync_engine() as sync:
        server = sync.serve()
        assert (await asyncio.to_thread(httpx.post, f"{server.url}/generate", json=body)).json()["text"] == expected
        server.close()
        with pytest.raises(httpx.ConnectError):
            await asyncio.to_thread(httpx.get, server.url)
        with http_server(sync) as server:
            assert (await asyncio.to_thread(httpx.get, f"{server.url}/health")).status_code == 200
