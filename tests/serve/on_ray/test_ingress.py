"""What the ingress makes of a request, without a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

pytest.importorskip("ray", reason="needs the extra ray")


class Replicas:
    """Stands for the handle of the replicas, and keeps the scopes of the requests."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []

    def options(self, **options: Any) -> Replicas:
        return self

    async def remote(self, key: Any, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        self.scopes.append(scope)
        yield 200, []


class Ended(Replicas):
    """Stands for the handle of replicas that have ended."""

    async def remote(self, *arguments: Any) -> Any:
        from ray.exceptions import ActorDiedError  # pyright: ignore[reportMissingImports]

        raise ActorDiedError


def request_of(method: str, path: str) -> Request:
    scope = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "query_string": b"",
             "headers": [], "client": ("192.0.2.1", 9), "server": ("127.0.0.1", 8000), "path": path}  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    return Request(scope, receive)


async def test_models_are_listed_by_get_and_not_by_replicas_that_ended() -> None:
    from serve.on_ray.ingress import Ingress

    names = {"a": ["a", "/a"], "b": ["b", "/b"]}
    ended: dict[str, Any] = {"a": Ended(), "b": Ended()}
    assert (await Ingress(ended, names)(request_of("GET", "/v1/models"))).status_code == 503
    replicas: dict[str, Any] = {"a": Replicas(), "b": Replicas()}
    await Ingress(replicas, names)(request_of("POST", "/v1/models"))
    assert [scope["method"] for scope in replicas["a"].scopes] == ["POST"]  # whose server refuses it


async def test_corpora_are_options_of_the_deployment() -> None:
    from serve.on_ray.ingress import Ingress

    replicas: Any = Replicas()
    for path in ("/add_external_corpus", "/remove_external_corpus"):
        answer = await Ingress({"m": replicas}, {"m": ["m"]})(request_of("POST", path))
        assert answer.status_code == 501
        assert b"--speculative-ngram-external-corpus-path" in answer.body
    assert not replicas.scopes


async def test_a_replica_takes_no_request_for_one_of_its_machine() -> None:
    from runtime.errors import Forbidden
    from serve.http.access import Access, AccessKey, RouteScope
    from serve.on_ray.ingress import Ingress

    replicas: Any = Replicas()
    headers = [(b"host", b"127.0.0.1:8000"), (b"authorization", b"Bearer user")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "query_string": b"",
             "headers": headers, "client": ("192.0.2.1", 9), "server": ("127.0.0.1", 8000),
             "path": "/generate"}  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    await Ingress({"m": replicas}, {"m": ["m"]})(Request(scope, receive))
    [seen] = replicas.scopes
    access = Access([AccessKey.of("api-key", "user", is_admin=False)], wants_key=True, host="127.0.0.1")
    assert access.admit(scope, RouteScope.USER).is_admin
    assert not access.admit(seen, RouteScope.USER).is_admin
    with pytest.raises(Forbidden):
        access.admit(seen, RouteScope.ADMIN)


async def test_the_error_of_a_lost_replica_is_numbered_after_its_last_event() -> None:
    from ray.exceptions import ActorDiedError  # pyright: ignore[reportMissingImports]

    from serve.on_ray.ingress import _body

    class Parts:
        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b'data: {"sequence_number":41}\n\n'
            raise ActorDiedError

    parts, headers = Parts(), {b"content-type": b"text/event-stream; charset=utf-8"}
    *_, error = [part async for part in _body(parts, "/v1/responses", headers)]
    assert b'"sequence_number":42,' in error
    assert parts.is_cancelled
