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
