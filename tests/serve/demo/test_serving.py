"""The demo model in the engine and the server, as a new user starts it."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

import http_server
from serve import Engine
from serve.server.app import build_app

LOOPBACK = ("127.0.0.1", "::1", "localhost")
QUESTION = {
    "messages": [{"role": "user", "content": "What does --chunked-prefill-size do?"}],
    "temperature": 0,
}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow sockets and name lookups for the loopback interface only."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(own: socket.socket, address: Any) -> None:
        if own.family != socket.AF_UNIX and address[0] not in LOOPBACK:
            raise AssertionError(f"the network was touched: {address}")
        connect(own, address)

    def guarded_names(host: Any, *args: Any, **options: Any) -> Any:
        if host not in (*LOOPBACK, None):
            raise AssertionError(f"a name was looked up: {host}")
        return getaddrinfo(host, *args, **options)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_names)


@pytest.mark.usefixtures("no_network")
async def test_right_answer_streams_without_a_network():
    async with (
        Engine() as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        lines: list[str] = []
        async with client.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
        whole = (await client.post("/v1/chat/completions", json=QUESTION)).json()
    text = whole["choices"][0]["message"]["content"]
    assert "cut into pieces" in text
    assert lines[-2] == "data: [DONE]"
    assert len(lines) > 20  # the answer arrived in pieces


@pytest.mark.usefixtures("no_network")
def test_the_guard_itself_refuses():
    with pytest.raises(AssertionError, match="network was touched"), socket.socket() as probe:
        probe.connect(("192.0.2.1", 9))
