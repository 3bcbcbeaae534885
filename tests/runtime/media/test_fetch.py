"""Media that are read from hosts, files and base64 text."""

from __future__ import annotations

from typing import Any

import pytest

import http_server
from runtime.config.plan import MediaPlan
from runtime.errors import InvalidRequest
from runtime.media.fetch import Fetcher
from runtime.media_source import KINDS, Form, MediaSource


async def test_a_host_is_asked_for_the_kind() -> None:
    async def host(scope: Any, receive: Any, send: Any) -> None:
        accepted = dict(scope["headers"])[b"accept"]
        status = 200 if accepted == scope["path"][1:].encode() + b"/*" else 406
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    fetcher = Fetcher(MediaPlan(enabled=True, domains=("127.0.0.1",)))
    async with http_server.serving(host, lifespan="off") as url:
        for kind in KINDS:
            assert await fetcher.read(MediaSource("url", f"{url}/{kind}", kind=kind)) == b"/" + kind.encode()
        await fetcher.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_name_the_kind(kind: Any) -> None:
    fetcher = Fetcher(MediaPlan(enabled=True, max_bytes=3))
    cases: list[tuple[Form, Any, str]] = [
        ("bytes", b"four", f"the {kind} has more than 3 bytes"),
        ("base64", "A" * 2048, f"the {kind} has more than 3 bytes"),
        ("path", "/a", f"send the {kind} itself"),
        ("url", "https://example.org/a", f"send the {kind} itself \\(data:{kind}/"),
    ]
    for form, content, reason in cases:
        with pytest.raises(InvalidRequest, match=reason):
            await fetcher.read(MediaSource(form, content, kind=kind))
