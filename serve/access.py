"""Who calls, and what they may call: scopes, keys, what pages of other origins may do, what headers say of callers.

A route has one of three scopes. `PUBLIC` answers anybody. `USER` requires a key where keys were set, `ADMIN` an
admin key; where none was set, it answers on loopback addresses alone, to whoever may call the user routes with
`--api-key` or without a key. Keys are compared in constant time.

A browser sends whatever page it shows to our address too. A request that shows no key is therefore refused when its
`Origin` is neither ours nor listed, or when another site's page made it without one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson
from starlette.types import Scope

from runtime.errors import ConfigurationError, Forbidden, TooManyRequests, Unauthorized
from runtime.request import NOBODY, Caller

if TYPE_CHECKING:
    from runtime.config.plan import ObservePlan, ServePlan

MAX_LABEL_CHARS = 128
MAX_TRACE_CHARS = 512  # what W3C wants carried on

ADMIN_NAME, USER_NAME = "admin-api-key", "api-key"  # of the keys that the command line names


class RouteScope(StrEnum):
    """Who may call a route."""

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request: the name of its key, empty without one."""

    name: str = ""
    is_admin: bool = False


# Whose request the running task answers; an engine called from Python answers its own process.
THIS_PROCESS = Client(is_admin=True)
CLIENT: ContextVar[Client] = ContextVar("penstock_client", default=THIS_PROCESS)
CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=NOBODY)  # what its headers say


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A key as it is kept: its digest alone, so that all have one length."""

    client: Client
    digest: bytes

    @classmethod
    def of(cls, name: str, key: str, *, is_admin: bool) -> AccessKey:
        return cls(Client(name, is_admin), _digest(key.encode()))


class Access:
    """Decides about every request. `wants_key`: user routes answer no request without one."""

    def __init__(
        self, keys: Sequence[AccessKey], *, wants_key: bool, is_loopback: bool, origins: Sequence[str] = ()
    ) -> None:
        self._keys = tuple(keys)
        self._wants_key = wants_key
        self._is_loopback = is_loopback
        self._origins = frozenset(origins)
        has_admin_key = any(key.client.is_admin for key in keys)
        self._admin_without_key = is_loopback and not has_admin_key
        self._anonymous = Client(is_admin=self._admin_without_key and not wants_key)

    @classmethod
    def of(cls, plan: ServePlan) -> Access:
        """Raises `ConfigurationError` when the file of keys cannot be used."""
        keys = read_key_file(plan.api_key_file) if plan.api_key_file else []
        if plan.api_key:
            keys.append(AccessKey.of(USER_NAME, plan.api_key, is_admin=False))
        if plan.admin_api_key:
            keys.append(AccessKey.of(ADMIN_NAME, plan.admin_api_key, is_admin=True))
        return cls(
            keys,
            wants_key=bool(plan.api_key or plan.api_key_file),
            is_loopback=is_loopback(plan.host),
            origins=plan.cors_allow_origins,
        )

    def admit(self, scope: Scope, route_scope: RouteScope) -> Client:
        """The client of a request to a route of this scope. Raises `Unauthorized` or `Forbidden`."""
        if route_scope is RouteScope.PUBLIC:
            return Client()
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        client = self._client_of(headers)
        if client is None:
            self._check_page(scope, headers, route_scope)
            client = self._anonymous
            if self._wants_key or (route_scope is RouteScope.ADMIN and not client.is_admin and self._keys):
                raise Unauthorized("Unauthorized")
        if route_scope is RouteScope.ADMIN and not client.is_admin:
            if self._is_loopback:
                raise Forbidden("This route requires the admin key.")
            raise Forbidden("This route requires the admin key, see --admin-api-key; without one it is off.")
        return client

    def _client_of(self, headers: Mapping[bytes, bytes]) -> Client | None:
        scheme, _, rest = headers.get(b"authorization", b"").partition(b" ")
        # Anthropic's clients send x-api-key.
        shown = rest.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")
        if shown is None:
            return None
        given = _digest(shown)
        found: Client | None = None
        for key in self._keys:  # all of them, whichever matches
            if hmac.compare_digest(given, key.digest):
                found = key.client
        if found is not None and found.name == USER_NAME and self._admin_without_key:
            return Client(USER_NAME, is_admin=True)
        return found

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes], route_scope: RouteScope) -> None:
        """Refuse what a page of another origin sends with this machine's browser."""
        if "*" in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is None:
            followed = route_scope is RouteScope.USER and headers.get(b"sec-fetch-mode") == b"navigate"
            if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and not followed:
                raise Forbidden("Pages of other sites may not call this server.")
            return
        given = origin.decode("latin-1")
        if given not in self._origins and not self._is_own(
            given, headers.get(b"host", b"").decode("latin-1")
        ):
            raise Forbidden(
                f"Pages of {given[:200]} may not call this server; list the origin with --cors-allow-origins."
            )

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page that this server sent made the request.

        On a loopback address a name other than localhost is a stranger's that was made to point here.
        """
        parts = urlsplit(origin)
        if not host or parts.netloc.lower() != host.lower():
            return False
        return not self._is_loopback or _is_literal(parts.hostname or "")


def read_key_file(path: str) -> list[AccessKey]:
    """The keys of a file: one a line, `NAME KEY` or `NAME KEY admin`; empty lines and `#` lines are skipped.

    Raises `ConfigurationError` naming the line, never the key.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigurationError(f"--api-key-file {path} cannot be read: {reason}.") from None
    keys: dict[str, AccessKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["admin"]):
            raise ConfigurationError(
                f"--api-key-file {path}, line {number}: write NAME KEY or NAME KEY admin, with spaces between."
            )
        key = AccessKey.of(words[0], words[1], is_admin=len(words) == 3)
        if words[0] in keys or words[0] in (ADMIN_NAME, USER_NAME):
            raise ConfigurationError(f"--api-key-file {path}, line {number}: the name is taken.")
        if any(key.digest == other.digest for other in keys.values()):
            raise ConfigurationError(f"--api-key-file {path}, line {number}: the key stands there twice.")
        keys[words[0]] = key
    if not keys:
        raise ConfigurationError(f"--api-key-file {path} holds no key.")
    return list(keys.values())


def is_loopback(host: str) -> bool:
    """Whether listening on `host` answers this machine alone."""
    if _is_literal(host):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)


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
    """The sender as the headers describe it. Labels that are not allowed, or no text, are left out."""
    trace = _trace(headers) if plan.trace_endpoint is not None else ()
    if not plan.request_labels:
        return Caller(trace=trace) if trace else NOBODY
    try:
        given = orjson.loads(headers.get(plan.labels_header) or "{}")
    except orjson.JSONDecodeError:
        given = {}
    if not isinstance(given, dict):
        given = {}
    values = (given.get(name, "") for name in plan.request_labels)
    labels = tuple(v[:MAX_LABEL_CHARS] if isinstance(v, str) else "" for v in values)
    return Caller(labels=labels, trace=trace)


def _trace(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The trace context, which says whose part the request is."""
    given = ((name, headers.get(name, "")) for name in ("traceparent", "tracestate"))
    return tuple((name, value) for name, value in given if 0 < len(value) <= MAX_TRACE_CHARS)


class OpenCalls:
    """How many calls a client has open at once, from its request's head to the end of its answer.

    Counts by key, or by address where no key is shown, and refuses what is over the limit; None: none is.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_open: dict[str, int] = {}

    @contextmanager
    def one_of(self, client: Client, scope: Scope) -> Iterator[None]:
        """While a call is open. Raises `TooManyRequests`."""
        if self._limit is None:
            yield
            return
        name = _name_of(client, scope)
        num_open = self._num_open.get(name, 0)
        if num_open >= self._limit:
            raise TooManyRequests(
                f"This client has {num_open} calls open, which is as many as it may have "
                "(--max-open-calls-per-client)."
            )
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
