"""Where ranks find each other, and how those on other machines come in at the master address.

Both sides prove to know a token, which never travels. What does is a challenge of each side and its HMAC-SHA256
(RFC 2104) under the token, so that nobody else and no wrong machine takes a rank. The connection itself is not
encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import orjson

from runtime.config.model_facts import ModelFacts
from runtime.distributed.link import LinkClosed, WorkerLink, encode
from runtime.errors import ConfigurationError

logger = logging.getLogger("penstock.core")

TOKEN_VARIABLE = "PENSTOCK_CLUSTER_TOKEN"  # in the environment of every machine
ANSWER_TIMEOUT_S = 10.0  # for one machine's answer, once it is connected
RETRY_S = 0.2
IDLE_S, INTERVAL_S, PROBES = 15, 5, 3  # of TCP: a machine that fell silent is given up after half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one model find each other. Travels to other processes as JSON."""

    host: str  # of rank 0's machine; its collectives listen there and only there
    timeout_s: float  # for all ranks to be there, and for a collective
    path: str | None = None  # a private file, where all ranks are on one machine
    port: int = 0  # or a port of the host
    key_prefix: str = ""  # which only these ranks know


def fingerprint(facts: ModelFacts) -> str:
    """What two machines must have in common to compute one model."""
    text = orjson.dumps(dict(facts.config), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()


class MasterListener:
    """The first machine's side. Listens at the master address, and nowhere else, while ranks are missing."""

    def __init__(self, address: tuple[str, int], token: str, model: str) -> None:
        self._token = token
        self._model = model
        try:
            self._listening = listen(*address)
        except OSError as error:
            raise ConfigurationError(
                f"--dist-init-addr {address[0]}:{address[1]} cannot be listened on: {error.strerror}."
            ) from error

    async def accept(self, ranks: Iterable[int]) -> dict[int, tuple[socket.socket, str]]:
        """The connection and the host of each of these ranks, when all of them have joined."""
        missing = set(ranks)
        found: dict[int, tuple[socket.socket, str]] = {}
        loop = asyncio.get_running_loop()
        try:
            while missing:
                connection, peer = await loop.sock_accept(self._listening)
                rank = await anyio.to_thread.run_sync(self._check, connection, frozenset(missing))
                if rank is None:
                    logger.warning(
                        "A connection from %s was refused: it is no rank that is missing.", peer[0]
                    )
                    connection.close()
                    continue
                missing.discard(rank)
                found[rank] = connection, peer[0]
        except BaseException:
            for connection, _ in found.values():
                connection.close()
            raise
        finally:
            self._listening.close()
        return found

    def _check(self, connection: socket.socket, missing: frozenset[int]) -> int | None:
        """The rank that joins, if it knows the token. Blocks."""
        connection.settimeout(ANSWER_TIMEOUT_S)
        challenge = secrets.token_hex(16)
        try:
            connection.sendall(encode({"challenge": challenge}))
            message = _read(connection)
            rank, answer = int(message["rank"]), str(message["answer"])
            if not hmac.compare_digest(answer, _proof(self._token, "join", challenge, str(rank))):
                return None
            refusal = self._refusal(rank, str(message["model"]), missing)
            proof = _proof(self._token, "welcome", str(message["challenge"]))
            connection.sendall(encode({"welcome": proof, "refusal": refusal}))
        except (OSError, LinkClosed, KeyError, TypeError, ValueError):
            return None
        keep_alive(connection)
        return None if refusal else rank

    def _refusal(self, rank: int, model: str, missing: frozenset[int]) -> str:
        if model != self._model:
            return "The machines have different models: their configurations are not the same."
        return "" if rank in missing else f"Rank {rank} is not missing; check --node-rank and the sizes."


def join_master(
    address: tuple[str, int], token: str, rank: int, model: str, timeout_s: float
) -> socket.socket:
    """The other machines' side: the connection of one rank, accepted. Blocks; waits for the master address to listen.

    Raises `ConfigurationError` when it is not there in time, does not know the token, or says no.
    """
    where = f"{address[0]}:{address[1]}"
    connection = _connect(address, timeout_s)
    connection.settimeout(timeout_s)
    mine = secrets.token_hex(16)
    try:
        challenge = str(_read(connection)["challenge"])
        answer = _proof(token, "join", challenge, str(rank))
        connection.sendall(encode({"rank": rank, "answer": answer, "challenge": mine, "model": model}))
        message = _read(connection)
    except (OSError, LinkClosed, KeyError, TypeError, ValueError) as error:
        connection.close()
        raise ConfigurationError(
            f"The machine at {where} refused rank {rank}; is {TOKEN_VARIABLE} the same on both?"
        ) from error
    if not hmac.compare_digest(str(message.get("welcome")), _proof(token, "welcome", mine)):
        connection.close()
        raise ConfigurationError(f"The machine at {where} does not know the token of {TOKEN_VARIABLE}.")
    if message.get("refusal"):
        connection.close()
        raise ConfigurationError(str(message["refusal"]))
    keep_alive(connection)
    connection.settimeout(None)
    return connection


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on this address alone, for a loop."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    listening.setblocking(False)
    return listening


def keep_alive(connection: socket.socket) -> None:
    """Small messages at once, and a peer that fell silent is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(address, timeout=ANSWER_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"There is no first machine at {address[0]}:{address[1]} (--dist-init-addr)."
                ) from error
            time.sleep(RETRY_S)


def _read(connection: socket.socket) -> dict[str, Any]:
    """The other side's next message, while it is not trusted yet: nothing large is read."""
    return WorkerLink(connection, max_bytes=4096).receive().body


def _proof(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()
