"""A pytest plugin with fixtures: an engine on the demo model, and clients for it.

The plugin imports Penstock only when a fixture is used, so that other test suites are not slowed down. The asynchronous
fixtures require a plugin that runs asynchronous tests (pytest-asyncio or anyio's).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def penstock() -> Iterator[Any]:
    """A `SyncEngine` on the demo model, shared by the whole test session."""
    from serve.testing.engines import sync_engine

    with sync_engine() as engine:
        yield engine


@pytest.fixture
def penstock_engine() -> Any:
    """An `Engine` on the demo model, which the test starts: `async with penstock_engine as engine`."""
    from serve.testing.engines import engine

    return engine()


@pytest.fixture
def penstock_client() -> Any:
    """An HTTP client for the whole server, without sockets: `async with penstock_client as http`."""
    from serve.testing.clients import client

    return client()


@pytest.fixture
def penstock_openai() -> Any:
    """An official OpenAI client for the same server: `async with penstock_openai as official`."""
    from serve.testing.clients import openai_client

    return openai_client()
