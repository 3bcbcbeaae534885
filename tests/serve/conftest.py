"""A server over the scripted core, reached through real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest

import fake_core
import http_server
from runtime.tokenizer.tokenizer import Tokenizer
from serve.server.connection import Connection
from served_core import Serve, Served, app_of


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return fake_core.load_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """`await serve(**options of FakeCore)` starts a server. All servers are stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(core: fake_core.FakeCore | None = None, **options: Any) -> Served:
            core = core or fake_core.FakeCore(tokenizer, **options)
            app = app_of(core)
            url = await stack.enter_async_context(http_server.serving(app, http=Connection))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
            official = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            return Served(core, client, await stack.enter_async_context(official), url, app.state.responses)

        yield start


@pytest.fixture
async def served(serve: Serve) -> Served:
    """A server where every choice generates fake_core.TEXT."""
    return await serve()
