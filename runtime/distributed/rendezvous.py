"""Lets ranks on other machines join an engine at the master address.

Both sides prove that they know a token without sending it: each one sends a challenge, and the other answers with an
HMAC-SHA256 (RFC 2104) under the token. A machine without the token therefore cannot join as a rank. The connection
itself is not encrypted.
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
from typing import Any

import anyio
import orjson

from runtime.config.model_facts import ModelFacts
from runtime.distributed.link import LinkClosed, WorkerLink, encode
from runtime.errors import ConfigurationError

logger = logging.getLogger("penstock.core")

TOKEN_VARIABLE = "PENSTOCK_CLUSTER_TOKEN"  # environment variable with the token, which must be set on every machine
ANSWER_TIMEOUT_S = 10.0  # timeout for each connection attempt, and for each answer
RETRY_S = 0.2
# TCP keep-alive in seconds: a machine counts as lost after 30 s without an answer.
IDLE_S, INTERVAL_S, PROBES = 15, 5, 3


def fingerprint(facts: ModelFacts) -> str:
    """Return a hash of the model's configuration. It must be equal on all machines."""
    text = orjson.dumps(dict(facts.config), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()


class MasterListener:
    """Accepts the ranks of other machines, on the first machine.

    Listens only at the master address, and only until all ranks have joined.
    """

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
        """Wait until all these ranks have joined. Return the connection and the host of each rank."""
        missing = set(ranks)
        joined: dict[int, tuple[socket.socket, str]] = {}
        loop = asyncio.get_running_loop()
        try:
            while missing:
                connection, peer = await loop.sock_accept(self._listening)
                rank = await anyio.to_thread.run_sync(self._check, connection, frozenset(missing))
                if rank is None:
                    logger.warning(
                        "Refused a connection from %s: it is not a missing rank with the right token.",
                        peer[0],
                    )
                    connection.close()
                    continue
                missing.discard(rank)
                joined[rank] = connection, peer[0]
        except BaseException:
            for connection, _ in joined.values():
                connection.close()
            raise
        finally:
            self._listening.close()
        return joined

    def _check(self, connection: socket.socket, missing: frozenset[int]) -> int | None:
        """Return the rank that joins over a connection, or None if it is refused. Blocks."""
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
            return "The machines have different models: their configurations differ."
        return "" if rank in missing else f"Rank {rank} is not missing. Check --node-rank and the parallel sizes."


def join_master(address: tuple[str, int], token: str, rank: int, model: str, timeout_s: float) -> socket.socket:
    """Join an engine as a rank on another machine. Return the connection. Blocks until the first machine answers.

    Raises `ConfigurationError` if the first machine does not answer in time, does not know the token, or refuses the
    rank.
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
            f"The machine at {where} refused rank {rank}. Set {TOKEN_VARIABLE} to the same value on both."
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
    """Return a non-blocking socket that listens on this address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    listening.setblocking(False)
    return listening


def keep_alive(connection: socket.socket) -> None:
    """Configure a connection: send small messages without delay, and detect a silent peer."""
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
                    f"No first machine answers at {address[0]}:{address[1]} (--dist-init-addr)."
                ) from error
            time.sleep(RETRY_S)


def _read(connection: socket.socket) -> dict[str, Any]:
    """Return the next message of a peer that has not proved its knowledge of the token. Limits the message's size."""
    return WorkerLink(connection, max_bytes=4096).receive().body


def _proof(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()
