"""The API key and what browsers may do."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from served_core import Serve, Served

KEY = "open-sesame-ü"


@pytest.fixture
async def locked(serve: Serve) -> Served:
    return await serve(api_key=KEY)


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}"],
)
async def test_without_the_key_nothing_is_answered(locked: Served, value: str | None) -> None:
    headers: Any = {} if value is None else {"authorization": value.encode()}
    for path in ("/generate", "/nothing", "/abort_request"):
        response = await locked.http.post(path, json={"text": "a", "abort_all": True}, headers=headers)
        assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    response = await locked.http.post("/v1/chat/completions", json={"text": "a"}, headers=headers)
    assert (response.status_code, response.json()["error"]["message"]) == (401, "Unauthorized")
    assert locked.core.submitted == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_key_it_is(locked: Served, scheme: str) -> None:
    headers: Any = {"authorization": f"{scheme} {KEY}".encode()}
    assert (await locked.http.post("/generate", json={"text": "a"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
async def test_health_needs_no_key(locked: Served, path: str) -> None:
    assert (await locked.http.get(path)).status_code == 200


async def test_metrics_path_is_not_behind_the_key(locked: Served) -> None:
    assert (await locked.http.get("/metrics")).status_code == 404  # not there yet, but not locked


async def test_official_client_sees_an_authentication_error(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        await locked.openai.models.list()


async def test_browsers_may_ask_before_they_have_the_key(locked: Served) -> None:
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await locked.http.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers


async def test_browsers_may_read_the_refusal(locked: Served) -> None:
    response = await locked.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "*"
