"""Access control: scopes of routes, API keys, browser origins, and data about the caller from headers.

A route has one of three scopes. `PUBLIC` routes answer every client. `USER` routes require a key if keys are
configured. `ADMIN` routes require an admin key. If no admin key is configured, admin routes answer only local requests,
and only if these have the key of `--api-key` or no key is configured. Keys are compared in constant time.

A request is local if it comes straight from this machine: the server listens on a loopback address, `Host` names a
loopback address, and no header shows that a proxy has forwarded the request.

Any page in a browser can send requests to this server. Therefore a request without a key is refused if its `Origin` is
neither this server nor in --cors-allow-origins, if it has no `Origin` but comes from a page of another site, or if
`Host` is a foreign name that resolves to a loopback address.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson
from starlette.types import Scope

from runtime.errors import ConfigurationError, Forbidden, TooManyRequests, Unauthorized
from runtime.request import ANONYMOUS, Caller
from serve.calls.client import Client

if TYPE_CHECKING:
    from runtime.config.plan import ObservePlan, ServePlan

PREFILLED = "x-penstock-prefilled"  # a router's header: a prefill server computes the prompt
MAX_LABEL_CHARS = 128
MAX_TRACE_CHARS = 512  # longer headers are ignored; W3C requires servers to propagate at least 512 characters

ADMIN_NAME, USER_NAME = "admin-api-key", "api-key"  # names of the clients with these keys


class RouteScope(StrEnum):
    """The clients that may call a route."""

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An API key. Only its digest is stored, so that comparisons do not depend on the key's length."""

    client: Client
    digest: bytes

    @classmethod
    def of(cls, name: str, key: str, *, is_admin: bool) -> AccessKey:
        return cls(Client(name, is_admin), _digest(key.encode()))


class Access:
    """Decides which requests are admitted. `wants_key`: user routes require a key."""

    def __init__(
        self,
        keys: Sequence[AccessKey],
        *,
        wants_key: bool,
        host: str,
        origins: Sequence[str] = (),
        public_origin: str | None = None,
    ) -> None:
        self._keys = tuple(keys)
        self._wants_key = wants_key
        self._host = host.lower()
        self._public_host = urlsplit(public_origin or "").hostname
        self._is_loopback = is_loopback(host)
        self._origins = frozenset((*origins, *([public_origin] if public_origin else ())))
        has_admin_key = any(key.client.is_admin for key in keys)
        self._trusts_local = self._is_loopback and not has_admin_key

    @classmethod
    def of(cls, plan: ServePlan) -> Access:
        """Return the access control of a server. Raises `ConfigurationError` if the key file is invalid."""
        keys = read_key_file(plan.api_key_file) if plan.api_key_file else []
        if plan.api_key:
            keys.append(AccessKey.of(USER_NAME, plan.api_key, is_admin=False))
        if plan.admin_api_key:
            keys.append(AccessKey.of(ADMIN_NAME, plan.admin_api_key, is_admin=True))
        return cls(
            keys,
            wants_key=bool(plan.api_key or plan.api_key_file),
            host=plan.host,
            origins=plan.cors_allow_origins,
            public_origin=plan.public_origin,
        )

    def admit(self, scope: Scope, route_scope: RouteScope) -> Client:
        """Return the client of a request if it may call a route of this scope.

        Otherwise raise `Unauthorized` (a key is missing or wrong) or `Forbidden`.
        """
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if route_scope is RouteScope.PUBLIC:
            self._check_host(headers)
            return Client()
        trusts = self._trusts_local and self._is_local(headers)
        client = self._client_of(headers)
        if client is not None and client.name == USER_NAME and trusts:
            client = Client(USER_NAME, is_admin=True)
        if client is None:
            self._check_page(scope, headers, route_scope)
            client = Client(is_admin=trusts and not self._wants_key)
            if self._wants_key or (route_scope is RouteScope.ADMIN and not client.is_admin and self._keys):
                raise Unauthorized("Unauthorized")
            self._check_host(headers)
        if route_scope is RouteScope.ADMIN and not client.is_admin:
            if self._trusts_local:
                raise Forbidden(
                    "This route requires the admin key (--admin-api-key): the request came through a proxy, "
                    "or its Host is not a loopback address."
                )
            if self._is_loopback:
                raise Forbidden("This route requires the admin key.")
            raise Forbidden("This route requires the admin key (--admin-api-key); it is disabled without one.")
        if route_scope is RouteScope.ADMIN and scope["method"] in ("GET", "HEAD") and not self._is_local(headers):
            raise Forbidden("Admin routes answer GET to local requests only; use POST.")
        return client

    def _client_of(self, headers: Mapping[bytes, bytes]) -> Client | None:
        scheme, _, rest = headers.get(b"authorization", b"").partition(b" ")
        # Anthropic's clients send x-api-key.
        key_header = rest.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")
        if key_header is None:
            return None
        digest = _digest(key_header)
        client: Client | None = None
        for key in self._keys:  # compare with every key, so that the time is constant
            if hmac.compare_digest(digest, key.digest):
                client = key.client
        return client

    def _is_local(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the `Host` header names this machine and no header comes from a proxy that forwarded the request."""
        host = _host_name(headers)
        return (host == self._host or _is_literal_loopback(host)) and not any(map(_is_forwarding, headers))

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes], route_scope: RouteScope) -> None:
        """Refuse requests that a page of another origin sends through a browser."""
        if "*" in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is None:
            followed = route_scope is RouteScope.USER and headers.get(b"sec-fetch-mode") == b"navigate"
            if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and not followed:
                raise Forbidden("Pages of other sites must not call this server.")
            return
        page_origin = origin.decode("latin-1")
        if page_origin not in self._origins and not self._is_own(
            page_origin, headers.get(b"host", b"").decode("latin-1")
        ):
            raise Forbidden(
                f"Pages of {page_origin[:200]} must not call this server; allow the origin with --cors-allow-origins."
            )

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether `origin` is this server, so that one of its own pages sent the request.

        The comparison with `Host` is safe, because `_check_host` refuses foreign names for this machine.
        """
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """On a loopback address, refuse a foreign name that resolves to this machine (DNS rebinding).

        A request without `Host` is accepted, because browsers always send it.
        """
        host = _host_name(headers)
        if (
            self._is_loopback
            and b"host" in headers
            and not (_is_literal(host) or host in (self._host, self._public_host))
        ):
            raise Forbidden(
                f"This server is not known as {host[:200]!r}; if a proxy forwards requests to it, name the "
                "proxy's address with --public-origin."
            )


def read_key_file(path: str) -> list[AccessKey]:
    """Return the keys of a file with lines `NAME KEY` or `NAME KEY admin`. Empty lines and lines with `#` are skipped.

    Raises `ConfigurationError` with the number of the invalid line, never with the key.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"--api-key-file {path} cannot be read: {reason}.") from None
    keys: dict[str, AccessKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["admin"]):
            raise ConfigurationError(
                f"--api-key-file {path}, line {number}: write NAME KEY or NAME KEY admin, separated by spaces."
            )
        key = AccessKey.of(words[0], words[1], is_admin=len(words) == 3)
        if words[0] in keys or words[0] in (ADMIN_NAME, USER_NAME):
            raise ConfigurationError(f"--api-key-file {path}, line {number}: the name is already used.")
        if any(key.digest == other.digest for other in keys.values()):
            raise ConfigurationError(f"--api-key-file {path}, line {number}: the key occurs twice.")
        keys[words[0]] = key
    if not keys:
        raise ConfigurationError(f"--api-key-file {path} contains no key.")
    return list(keys.values())


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached only from this machine."""
    if _is_literal(host):
        return _is_literal_loopback(host)
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in addresses)


def _host_name(headers: Mapping[bytes, bytes]) -> str:
    """Return the name or address in `Host`, without the port, or "" if there is no valid `Host`."""
    try:
        return urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _is_forwarding(name: bytes) -> bool:
    """Whether proxies add a header of this name to the requests that they forward."""
    return name.startswith(b"x-forwarded-") or name in (b"forwarded", b"x-real-ip", b"via")


def _is_literal_loopback(host: str) -> bool:
    return host == "localhost" or (_is_literal(host) and ipaddress.ip_address(host).is_loopback)


def _is_literal(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def caller_of(headers: Mapping[str, str], plan: ObservePlan) -> Caller:
    """Return the caller data from the headers: labels, trace context, and whether a prefill server has the prompt.

    Labels that are not allowed or are not strings are left out.
    """
    trace = _trace(headers) if plan.trace_endpoint is not None else ()
    prefilled = PREFILLED in headers
    if not plan.request_labels:
        return Caller(trace=trace, prefilled=prefilled) if trace or prefilled else ANONYMOUS
    try:
        header_labels = orjson.loads(headers.get(plan.labels_header) or "{}")
    except orjson.JSONDecodeError:
        header_labels = {}
    if not isinstance(header_labels, dict):
        header_labels = {}
    values = (header_labels.get(name, "") for name in plan.request_labels)
    labels = tuple(v[:MAX_LABEL_CHARS] if isinstance(v, str) else "" for v in values)
    return Caller(labels=labels, trace=trace, prefilled=prefilled)


def _trace(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the trace context of the request: its W3C headers traceparent and tracestate."""
    headers_of_trace = ((name, headers.get(name, "")) for name in ("traceparent", "tracestate"))
    return tuple((name, value) for name, value in headers_of_trace if 0 < len(value) <= MAX_TRACE_CHARS)


class OpenCalls:
    """Limits the open calls of each client to `limit` (None: no limit).

    A call is open from the arrival of its headers to the end of its answer. A client is identified by its key, or by
    its address if it sends no key.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_open: dict[str, int] = {}

    @contextmanager
    def slot(self, client: Client, scope: Scope) -> Iterator[None]:
        """Count one open call while the block runs. Raises `TooManyRequests` if the client has reached the limit."""
        if self._limit is None:
            yield
            return
        name = _name_of(client, scope)
        num_open = self._num_open.get(name, 0)
        if num_open >= self._limit:
            raise TooManyRequests(f"This client has {num_open} open calls, the maximum (--max-open-calls-per-client).")
        self._num_open[name] = num_open + 1
        try:
            yield
        finally:
            left = self._num_open[name] - 1
            if left:
                self._num_open[name] = left
            else:
                del self._num_open[name]


def _name_of(client: Client, scope: Scope) -> str:
    if client.name:
        return f"key {client.name}"
    peer = scope.get("client")
    return f"address {peer[0] if peer else ''}"
