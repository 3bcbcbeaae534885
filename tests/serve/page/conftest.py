"""The chat page in a real browser, with a scripted core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import browser
import fake_core
import http_server
from runtime.tokenizer.tokenizer import Tokenizer
from served_core import app_of


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return fake_core.load_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def window() -> Iterator[browser.Page]:
    if reason := browser.missing():
        pytest.skip(reason)
    with browser.started() as page:
        yield page


@pytest.fixture
async def open_page(window: browser.Page) -> AsyncIterator[browser.Open]:
    """`await open_page(app)` serves the application and opens its page on a desktop screen.

    The test fails if a script of the page failed or violated the content security policy.
    """
    async with AsyncExitStack() as stack:

        async def start(app: Any) -> browser.Page:
            url = await stack.enter_async_context(http_server.serving(app))
            # closes the page's connections before the server stops
            stack.push_async_callback(window.open, "about:blank")
            await window.resize(1200, 800)
            await window.open(url)
            return window

        yield start
        complaints = await window.complaints()
        assert [said for said in complaints if "Failed to load resource" not in said] == []


@pytest.fixture
async def chat(open_page: browser.Open, tokenizer: Tokenizer) -> browser.Open:
    """`await chat(core)` opens the page of a server with this core."""

    async def start(core: fake_core.FakeCore) -> browser.Page:
        return await open_page(app_of(core))

    return start
