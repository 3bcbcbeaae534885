"""Unmodified clients against a real server with a scripted model: chat, streams, tools, structured output."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fake_core
import http_server
from runtime.request import Request
from serve.server.connection import Connection
from served_core import app_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPTS = Path(__file__).parent / "scripts"
OTHERS = "langchain-openai instructor pydantic-ai-slim[openai] openai-agents"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def answer_to(prompt: str) -> str:
    """Return the model's answer: a call until its result exists, a city as JSON, or a greeting."""
    if "sunny in Oslo" in prompt:
        return "It is sunny."
    if "Weather?" in prompt:
        return CALL
    return '{"name": "Oslo", "celsius": 3}' if "A city" in prompt else "Hello there."


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    tokenizer = fake_core.load_tokenizer(tmp_path)

    def ids_of(request: Request, index: int) -> list[int]:
        return tokenizer.encode_batch([answer_to(request.text or "")], add_special_tokens=False)[0]

    core = fake_core.FakeCore(tokenizer, ids_of=ids_of, tool_call_parser="qwen25")
    async with http_server.serving(app_of(core), http=Connection) as address:
        yield address


async def run(*command: str, url: str, cwd: Path) -> None:
    arguments = (*command, url, fake_core.MODEL, "structured")
    process = await asyncio.create_subprocess_exec(
        *arguments, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]


@pytest.mark.parametrize(
    ("script", "client_python"),
    [
        ("with_litellm", "litellm mcp"),  # extras that conflict with others
        ("with_langchain", OTHERS),
        ("with_instructor", OTHERS),
        ("with_pydantic_ai", OTHERS),
        ("with_openai_agents", OTHERS),
        ("with_llama_index", "llama-index-llms-openai-like"),
    ],
    indirect=["client_python"],
)
async def test_clients_in_python(url: str, client_python: Path, script: str) -> None:
    await run(str(client_python), str(SCRIPTS / f"{script}.py"), url=url, cwd=SCRIPTS)


@pytest.mark.parametrize("script", ["with_openai.mjs", "with_ai.mjs"])
async def test_clients_in_node(url: str, client_node_modules: Path, script: str) -> None:
    shutil.copy(SCRIPTS / script, client_node_modules)  # so that Node finds modules from the script's folder
    await run("node", script, url=url, cwd=client_node_modules)
