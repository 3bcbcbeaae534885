"""Read the `bootstrap_*` fields, with which SGLang's routers name the prefill server of a request.

Such a router sends the same body to a prefill server and to a decode server. The prefill server computes the prompt and
one token. The decode server waits for the KV cache pages of the prompt, and finds them by a hash of the tokens.
Therefore `bootstrap_room`, a number that identifies the request, is checked but not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from runtime.errors import InvalidRequest
from runtime.request import Caller, Request
from serve.calls.decode import Length, Range
from serve.calls.prompts import MAX_PROMPTS, spread

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Host = Annotated[str, Length(1, 255)]
Port = Annotated[int, Range(1, 65535)]
Room = Annotated[int, Range(0, 2**63 - 1)]
Hosts = Host | Annotated[list[Host], Length(1, MAX_PROMPTS)]
Ports = Port | Annotated[list[Port | None], Length(1, MAX_PROMPTS)]
Rooms = Room | Annotated[list[Room], Length(1, MAX_PROMPTS)]


class HasBootstrap(Protocol):
    """A request body with the fields of SGLang's routers. If a field is a list, it has one value per prompt."""

    bootstrap_host: Hosts | None
    bootstrap_port: Ports | None
    bootstrap_room: Rooms | None


def with_prefill_server(
    body: HasBootstrap, core: EngineCore, requests: Sequence[Request], *, joined: bool = False
) -> list[Request]:
    """Return the requests; on a decode server, mark them as prefilled if the body names a prefill server.

    `joined`: the router copies the prompt's log-probabilities from the prefill server's answer, so the decode server
    leaves them out of its own answer. Raises `InvalidRequest` if the body names a prefill server, and this server has
    no disaggregation role or does not have that prefill server among its peers.
    """
    if body.bootstrap_host is None:
        for name in ("bootstrap_port", "bootstrap_room"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} needs bootstrap_host.", param=name)
        return [*requests]
    count, role = len(requests), core.plan.cache.role
    if role in ("null", "replicas"):
        raise InvalidRequest(
            "bootstrap_host needs a server with --disaggregation-mode prefill or decode; this server computes prompts "
            "and outputs.",
            param="bootstrap_host",
        )
    hosts, ports = (
        spread(body.bootstrap_host, count, "bootstrap_host"),
        spread(body.bootstrap_port, count, "bootstrap_port"),
    )
    spread(body.bootstrap_room, count, "bootstrap_room")
    if role == "prefill":
        return [*requests]
    for host, port in dict.fromkeys(zip(hosts, ports, strict=True)):
        _check_peer(core.plan.cache.storage_config["peers"], host, port)
    return [_prefilled(request, joined=joined) for request in requests]


def _check_peer(peers: Sequence[Sequence[Any]], host: str, port: int | None) -> None:
    """Raise `InvalidRequest` unless this decode server's options name this prefill server."""
    plain = host.strip("[]").lower()
    for known, known_port in peers:
        if known.strip("[]").lower() == plain and port in (None, known_port):
            return
    where = host if port is None else f"{host}:{port}"
    raise InvalidRequest(
        f"bootstrap_host {where[:270]} is not among the prefill servers of this decode server; set "
        "--disaggregation-prefill to the names that the router uses.",
        param="bootstrap_host",
    )


def _prefilled(request: Request, *, joined: bool) -> Request:
    logprobs = request.logprobs
    if joined and logprobs is not None:
        logprobs = replace(logprobs, start=-1)
    return replace(request, caller=Caller(prefilled=True), logprobs=logprobs)
