"""Image messages of unmodified clients against the real server with a model that sees."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import http_server
import tiny_seeing
from serve import Engine
from serve.server.app import build_app
from serve.server.connection import Connection
from tiny_seeing import picture, png

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPTS = Path(__file__).parent / "scripts"
FAMILY, QUESTION = "llava", "What is it?"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    options = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32", "served_model_name": "x"}
    engine = Engine(tiny_seeing.cached(FAMILY), **options)
    async with engine, http_server.serving(build_app(engine.core), http=Connection) as address:
        yield address


def wanted() -> str:
    """Return transformers' answer to the question about the picture."""
    path = tiny_seeing.cached(FAMILY)
    text = f"<|im_start|>user\n<image>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids, _ = tiny_seeing.reference(path, FAMILY, text, [picture(40, 30, 1)], 6)
    return tiny_seeing.processor_of(path, FAMILY).tokenizer.decode(ids, skip_special_tokens=True)


async def run(*command: str, url: str, cwd: Path) -> None:
    arguments = (url, "x", base64.b64encode(png(picture(40, 30, 1))).decode(), QUESTION, wanted())
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]


@pytest.mark.parametrize("client_python", ["langchain-openai"], indirect=True)
async def test_langchain(url: str, client_python: Path) -> None:
    await run(str(client_python), str(SCRIPTS / "with_langchain_images.py"), url=url, cwd=SCRIPTS)


async def test_ai_of_vercel(url: str, client_node_modules: Path) -> None:
    shutil.copy(SCRIPTS / "with_ai_images.mjs", client_node_modules)  # so that Node finds modules from its folder
    await run("node", "with_ai_images.mjs", url=url, cwd=client_node_modules)
