"""Scopes of routes, API keys, and access from web pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from starlette.routing import Route

import fake_core
from runtime.errors import ConfigurationError
from serve.http.access import Access, RouteScope, is_loopback, read_key_file
from serve.page import PATHS as PAGE_PATHS
from serve.server import unsupported
from serve.server.app import ROUTES, build_app
from served_core import Serve, Served

KEY, ADMIN_KEY = "open-sesame-ü", "open-all"
NO_BODY = (
    "/reset_prefix_cache",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/v1/files",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/batches/{batch_id}/cancel",
    "/stop_profile",
    "/flush_cache",
    "/clear_hicache_storage_backend",
    "/hicache/storage-backend/clear",
    "/freeze_gc",
    "/v1/models",
    "/v1/responses/{response_id}/cancel",
)
BEYOND = {"host": "0.0.0.0"}  # address in the plan; the tests' sockets are always on the loopback interface


# Absent routes differ only in their names, so one of each scope represents them.
ABSENT = {spec.scope: spec for spec in reversed(ROUTES) if spec.handler is unsupported.answer}
PRESENT = [spec for spec in ROUTES if spec.handler is not unsupported.answer]


def bearer(key: str) -> Any:
    return {"authorization": f"Bearer {key}".encode()}


def sent(path: str) -> dict[str, Any]:
    """Return a body for the route, whose access checks come first."""
    return {"json": {}} if path != "/flush_cache" else {}


def test_every_route_has_a_scope_and_none_stands_outside_the_table() -> None:
    core = fake_core.FakeCore(None)
    served = {cast(Route, route).path for route in build_app(cast(Any, core)).routes}
    assert served == {spec.path for spec in ROUTES} | set(PAGE_PATHS)
    for spec in ROUTES:
        assert isinstance(spec.scope, RouteScope), f"{spec.path} has no scope"
    assert {spec.path for spec in ROUTES if spec.scope is RouteScope.PUBLIC} == {
        *("/health", "/ready", "/metrics", "/ping")
    }


@pytest.fixture
async def locked(serve: Serve) -> Served:
    return await serve(api_key=KEY)


async def test_without_a_key_only_public_routes_answer(locked: Served) -> None:
    for spec in (*PRESENT, *ABSENT.values()):
        for method in spec.methods:
            response = await locked.http.request(method, spec.path.replace("{model:path}", "x"), **sent(spec.path))
            assert (response.status_code == 401) == (spec.scope is not RouteScope.PUBLIC), (method, spec.path)
    assert locked.core.submitted == []


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}"],
)
async def test_without_the_key_nothing_is_answered(locked: Served, value: str | None) -> None:
    headers: Any = {} if value is None else {"authorization": value.encode()}
    for path in ("/generate", "/nothing", "/abort_request", "/metrics"):
        response = await locked.http.post(path, json={"text": "a", "abort_all": True}, headers=headers)
        assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    response = await locked.http.post("/v1/chat/completions", json={"text": "a"}, headers=headers)
    assert (response.status_code, response.json()["error"]["message"]) == (401, "Unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert locked.core.submitted == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_key_it_is(locked: Served, scheme: str) -> None:
    headers: Any = {"authorization": f"{scheme} {KEY}".encode()}
    assert (await locked.http.post("/generate", json={"text": "a"}, headers=headers)).status_code == 200
    assert (await locked.http.post("/nothing", headers=headers)).status_code == 404


async def test_official_client_sees_an_authentication_error(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        await locked.openai.models.list()


# --- admin routes ---


@pytest.mark.parametrize(
    ("plan", "key", "status"),
    [
        ({}, None, 200),  # a user of this machine
        ({"api_key": KEY}, KEY, 200),
        ({"api_key": KEY}, None, 401),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY}, KEY, 403),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY}, ADMIN_KEY, 200),
        ({"admin_api_key": ADMIN_KEY}, None, 401),
        (BEYOND, None, 403),
        ({"api_key": KEY, **BEYOND}, KEY, 403),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY, **BEYOND}, KEY, 403),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY, **BEYOND}, ADMIN_KEY, 200),
    ],
)
async def test_admin_routes_want_the_admin_key(
    serve: Serve, plan: dict[str, Any], key: str | None, status: int
) -> None:
    served = await serve(**plan)
    response = await served.http.post("/flush_cache", headers=bearer(key) if key else {})
    assert response.status_code == status
    assert served.core.num_flushes == (status == 200)


async def test_admin_key_alone_leaves_user_routes_open_and_opens_them_too(serve: Serve) -> None:
    served = await serve(admin_api_key=ADMIN_KEY)
    assert (await served.http.get("/v1/models")).status_code == 200
    assert (await served.http.get("/v1/models", headers=bearer(ADMIN_KEY))).status_code == 200


FORWARDED: Any = [
    {"forwarded": "for=192.0.2.1"},
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-proto": "https"},
    {"x-real-ip": "192.0.2.1"},
    {"host": "models.example"},
    {"host": "penstock"},
    {"host": "10.0.0.1:30000"},
]


@pytest.mark.parametrize("sent", FORWARDED, ids=str)
@pytest.mark.parametrize("plan", [{}, {"api_key": KEY}, {"public_origin": "https://models.example"}], ids=str)
async def test_trust_in_loopback_ends_where_a_proxy_begins(
    serve: Serve, plan: dict[str, Any], sent: dict[str, str]
) -> None:
    served = await serve(**plan)
    key = bearer(KEY) if "api_key" in plan else {}
    for path in ("/flush_cache", "/start_profile"):
        assert (await served.http.post(path, headers=key | sent)).status_code == 403, path
    refused = await served.http.post("/abort_request", json={"abort_all": True}, headers=key | sent)
    assert (refused.status_code == 403) == (not key)
    assert (await served.http.post("/flush_cache", headers=key)).status_code == 200
    assert served.core.num_flushes == 1


async def test_public_origin_is_the_chat_pages_own(serve: Serve) -> None:
    origin = "https://models.example"
    forwarded = {"host": "models.example", "x-forwarded-for": "192.0.2.1", "origin": origin}
    served = await serve(public_origin=origin)
    assert (await served.http.post("/generate", json={"text": "a"}, headers=forwarded)).status_code == 200
    other = forwarded | {"origin": "https://models.example.evil"}
    assert (await served.http.post("/generate", json={"text": "a"}, headers=other)).status_code == 403


# --- several keys ---


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("# people\nada ada-key\n\n bob  bob-key \nroot root-key admin\n")
    return str(path)


async def test_named_keys_open_and_end_their_own_requests_only(serve: Serve, key_file: str) -> None:
    served = await serve(api_key_file=key_file, held=True)
    assert (await served.http.get("/v1/models")).status_code == 401
    asked = [
        asyncio.create_task(served.http.post("/generate", json={"text": "a", "rid": "job"}, headers=bearer(key)))
        for key in ("ada-key", "bob-key")
    ]
    while served.core.num_open < 2:
        await asyncio.sleep(0)
    owners = {request.id: request.owner for request in served.core.submitted}
    for body in ({"rid": "jo"}, {"abort_all": True}):
        assert (await served.http.post("/abort_request", json=body, headers=bearer("ada-key"))).is_success
        assert [owners[request_id] for request_id in served.core.aborted] == ["ada"]
    flushed = [await served.http.post("/flush_cache", headers=bearer(key)) for key in ("ada-key", "root-key")]
    assert [response.status_code for response in flushed] == [403, 400]
    assert (await served.http.post("/abort_request", json={"rid": "j"}, headers=bearer("root-key"))).is_success
    await asyncio.gather(*asked)
    assert served.core.num_open == 0


MESSAGES = {"model": "tiny-model", "messages": [{"role": "user", "content": "a"}]}
GENERATING: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": MESSAGES,
    "/invocations": {**MESSAGES, "stream": True},
    "/v1/responses": {"model": "tiny-model", "input": "a"},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
    "/api/chat": MESSAGES,
    "/api/generate": {"model": "tiny-model", "prompt": "a"},
}


async def test_every_request_carries_the_key_that_sent_it(serve: Serve, key_file: str) -> None:
    served = await serve(api_key_file=key_file)
    for path, body in GENERATING.items():
        for name in ("ada", "bob"):
            response = await served.http.post(path, json=body, headers=bearer(f"{name}-key"))
            assert response.status_code == 200, response.text
            assert served.core.submitted[-1].owner == name, path
    assert len(served.core.submitted) == 2 * len(GENERATING)


async def test_response_of_another_key_is_neither_cancelled_nor_deleted(serve: Serve, key_file: str) -> None:
    served = await serve(api_key_file=key_file, held=True)
    body = {"model": "tiny-model", "input": "a", "background": True}
    made = await served.http.post("/v1/responses", json=body, headers=bearer("ada-key"))
    path = f"/v1/responses/{made.json()['id']}"
    for method, tail in (("POST", "/cancel"), ("DELETE", ""), ("GET", ""), ("GET", "/input_items")):
        for key in ("bob-key", "root-key"):
            response = await served.http.request(method, path + tail, headers=bearer(key))
            assert response.status_code == 404, (method, tail)
    assert (served.core.num_open, served.core.aborted) == (1, [])
    assert (await served.http.post(path + "/cancel", headers=bearer("ada-key"))).json()["status"] == "cancelled"
    assert len(served.core.aborted) == 1


async def test_one_client_may_have_so_many_calls_open_and_no_more(serve: Serve, key_file: str) -> None:
    served = await serve(api_key_file=key_file, held=True, max_open_calls=2)

    async def ask(key: str, path: str = "/generate", **body: Any) -> Any:
        return await served.http.post(path, json={"text": "a", **body}, headers=bearer(key))

    async def open_calls(num: int) -> None:
        while served.core.num_open < num:
            await asyncio.sleep(0)

    first = [asyncio.create_task(ask("ada-key", stream=stream)) for stream in (True, False)]
    await open_calls(2)
    for path in ("/generate", "/v1/chat/completions", "/v1/messages", "/api/chat"):
        refused = await ask("ada-key", path)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), path
        assert "--max-open-calls-per-client" in refused.text
    other = asyncio.create_task(ask("bob-key"))
    await open_calls(3)
    assert (await served.http.get("/health")).status_code == 200
    while served.core.num_open:
        served.core.step()
        await asyncio.sleep(0)
    assert [(await task).status_code for task in (*first, other)] == [200] * 3
    last = asyncio.create_task(ask("ada-key", stream=True))
    await open_calls(1)
    last.cancel()  # a call that ends makes room
    await asyncio.wait([last])
    while served.core.num_open:
        await asyncio.sleep(0)
    served.core.held = False
    for _ in range(3):
        assert (await ask("ada-key")).status_code == 200


async def test_without_keys_the_address_counts(serve: Serve) -> None:
    served = await serve(held=True, max_open_calls=1)
    asked = asyncio.create_task(served.post("/generate", text="a"))
    while not served.core.num_open:
        await asyncio.sleep(0)
    assert (await served.http.post("/generate", json={"text": "a"})).status_code == 429
    while served.core.num_open:
        served.core.step()
        await asyncio.sleep(0)
    await asked


async def test_stranger_without_a_key_ends_only_what_it_can_name(serve: Serve) -> None:
    served = await serve(held=True, **BEYOND)
    asked = asyncio.create_task(served.post("/generate", text=["a", "b"], rid="mine"))
    other = asyncio.create_task(served.post("/generate", text="c", rid="mine_2"))
    while served.core.num_open < 3:
        await asyncio.sleep(0)
    assert (await served.http.post("/abort_request", json={"abort_all": True})).status_code == 403
    assert (await served.http.post("/abort_request", json={"rid": "m"})).status_code == 200
    assert served.core.aborted == []
    assert (await served.http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    await asked
    assert len(served.core.aborted) == 2
    assert (await served.http.post("/abort_request", json={"rid": "mine_2"})).status_code == 200
    await other
    assert len(served.core.aborted) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no key"),
        ("ada", "line 1"),
        ("ada secret-word root", "line 1"),
        ("ada secret-word\nada other", "line 2: the name"),
        ("ada secret-word\nbob secret-word", "line 2: the key"),
        ("api-key secret-word", "line 1: the name"),
    ],
)
def test_key_file_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_key_file(str(path))
    assert "secret-word" not in str(caught.value)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_key_file(str(tmp_path / "none"))


def test_keys_are_not_kept() -> None:
    access = Access.of(fake_core.make_plan(api_key=KEY, admin_api_key=ADMIN_KEY).serve)
    kept = repr(vars(access))
    assert KEY not in kept
    assert ADMIN_KEY not in kept


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("no.such.invalid", False),
    ],
)
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# --- web pages ---


async def test_no_page_of_another_origin_may_call(served: Served) -> None:
    host = served.url.removeprefix("http://")
    for origin in ("https://app.example", "null", "http://localhost:1", f"http://evil.example:{host[-5:]}"):
        response = await served.http.post("/generate", json={"text": "a"}, headers={"origin": origin})
        assert response.status_code == 403
        assert "--cors-allow-origins" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers
    assert served.core.submitted == []
    response = await served.http.post("/generate", json={"text": "a"}, headers={"origin": f"http://{host}"})
    assert response.status_code == 200  # of the chat page


ADMIN_GETS = [spec.path for spec in ROUTES if spec.scope is RouteScope.ADMIN and "GET" in spec.methods]


async def test_foreign_name_of_this_machine_reaches_no_route(serve: Serve) -> None:
    served, named = await serve(), await serve(host="localhost", public_origin="https://models.example:8443")
    foreign = {"host": "evil.example:30000"}
    for spec in (*PRESENT, *ABSENT.values()):
        for method in (*spec.methods, *(["HEAD"] if "GET" in spec.methods else [])):
            path = spec.path.replace("{model:path}", "x")
            answer = await served.http.request(method, path, headers=foreign, **sent(spec.path))
            assert answer.status_code == 403, (method, path)
    assert (await served.http.get("/no/such", headers=foreign)).status_code == 403
    assert (served.core.submitted, served.core.num_flushes) == ([], 0)
    for host in ("localhost:30000", "127.0.0.2", "[::1]:30000", "10.0.0.1", "LOCALHOST", "models.example"):
        assert (await named.http.get("/server_info", headers={"host": host})).status_code == 200, host
    for host in ("", "evil.localhost.example", "localhost.", "[::1", "models.example.evil"):
        assert (await named.http.get("/server_info", headers={"host": host})).status_code == 403, host


async def test_key_opens_routes_under_any_name(locked: Served) -> None:
    headers = bearer(KEY) | {"host": "models.example"}
    assert (await locked.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("plan", [{}, BEYOND], ids=str)
async def test_admin_routes_answer_get_to_local_requests_only(serve: Serve, plan: dict[str, Any]) -> None:
    served = await serve(admin_api_key=ADMIN_KEY, **plan)
    for path in ADMIN_GETS:
        for elsewhere in ({"host": "models.example"}, {"x-forwarded-for": "192.0.2.1"}):
            for method in ("GET", "HEAD"):
                refused = await served.http.request(method, path, headers=bearer(ADMIN_KEY) | elsewhere)
                assert refused.status_code == 403, path
            posted = await served.http.post("/flush_cache", headers=bearer(ADMIN_KEY) | elsewhere)
            assert posted.status_code == 200
    before = served.core.num_flushes
    assert (await served.http.get("/flush_cache", headers=bearer(ADMIN_KEY))).status_code == 200
    assert served.core.num_flushes == before + 1


async def test_name_that_was_made_to_point_here_is_nobody(serve: Serve) -> None:
    body, headers = {"text": "a"}, {"origin": "http://evil.example:3", "host": "evil.example:3"}
    served = await serve()
    assert (await served.http.post("/generate", json=body, headers=headers)).status_code == 403
    served = await serve(**BEYOND)  # a public server has names that are not known
    assert (await served.http.post("/generate", json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_page_cannot_get_as_an_image_or_a_link(served: Served, site: str) -> None:
    image = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    for path, headers, status in (
        ("/flush_cache", image, 403),
        ("/flush_cache", link, 403),
        ("/health_generate", image, 403),
        ("/get_model_info", link, 200),
        ("/", link, 200),
        ("/health", image, 200),
    ):
        assert (await served.http.get(path, headers=headers)).status_code == status, path
    assert served.core.num_flushes == 0


async def test_origins_are_allowed_one_by_one(serve: Serve) -> None:
    served = await serve(cors_allow_origins=("https://app.example",))
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    mine, other = {"origin": "https://app.example"}, {"origin": "https://other.example"}
    allowed = await served.http.options("/generate", headers=ask | mine)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, mine["origin"])
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in (await served.http.options("/generate", headers=ask | other)).headers
    assert (await served.http.post("/generate", json={"text": "a"}, headers=mine)).is_success
    assert (await served.http.post("/generate", json={"text": "a"}, headers=other)).status_code == 403


async def test_refusal_can_be_read_where_every_origin_is_allowed(serve: Serve) -> None:
    served = await serve(api_key=KEY, cors_allow_origins=("*",))
    response = await served.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "*")


async def test_who_shows_a_key_is_no_page(locked: Served) -> None:
    headers = bearer(KEY) | {"origin": "https://app.example"}
    assert (await locked.http.get("/v1/models", headers=headers)).status_code == 200


BODIES = [spec.path for spec in PRESENT if "POST" in spec.methods and spec.path not in NO_BODY]


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", "", None])
async def test_bodies_must_be_declared_as_json(served: Served, declared: str | None) -> None:
    headers = {} if declared is None else {"content-type": declared}
    for path in BODIES:
        if path.startswith("/api/"):
            continue
        response = await served.http.post(path, content=b'{"prompt": "a", "text": "a", "rid": "a"}', headers=headers)
        assert response.status_code == 400, path
        assert "Unsupported Media Type: Only 'application/json' is allowed." in response.text
    assert served.core.submitted == []
