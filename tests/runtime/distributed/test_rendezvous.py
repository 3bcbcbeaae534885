"""Only a machine that knows the token, has the same model and is expected may join. Both sides prove the token."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from runtime.distributed.rendezvous import MasterListener, join_master, listen
from runtime.errors import ConfigurationError


def take(joined: dict[int, tuple[socket.socket, str]]) -> set[int]:
    """Accept the ranks, and close their connections."""
    for connection, _ in joined.values():
        connection.close()
    return set(joined)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


async def meet(*, rank: int = 1, token: str = "secret", model: str = "model") -> list[int]:
    """Let this rank join a group that waits for rank 1. Raise its error, or return the accepted ranks."""
    address = ("127.0.0.1", free_port())
    accepting = asyncio.create_task(MasterListener(address, "secret", "model").accept([1]))
    try:
        connection = await asyncio.to_thread(join_master, address, token, rank, model, 5.0)
        connection.close()
        return list(take(await accepting))
    finally:
        accepting.cancel()
        with suppress(asyncio.CancelledError):
            await accepting


async def test_rank_that_proves_itself_is_taken():
    assert await meet() == [1]


async def test_wrong_token_is_turned_away():
    with pytest.raises(ConfigurationError, match="PENSTOCK_CLUSTER_TOKEN"):
        await meet(token="guess")


async def test_other_model_is_refused():
    with pytest.raises(ConfigurationError, match="different models"):
        await meet(model="another")


async def test_rank_that_is_not_missing_is_refused():
    with pytest.raises(ConfigurationError, match="Rank 7 is not missing"):
        await meet(rank=7)


async def test_false_first_machine_is_found_out():
    address = ("127.0.0.1", free_port())
    accepting = asyncio.create_task(MasterListener(address, "another secret", "model").accept([1]))
    with pytest.raises(ConfigurationError):
        await asyncio.to_thread(join_master, address, "secret", 1, "model", 5.0)
    accepting.cancel()
    with suppress(asyncio.CancelledError):
        await accepting


async def test_strangers_do_not_keep_a_rank_out():
    address = ("127.0.0.1", free_port())
    accepting = asyncio.create_task(MasterListener(address, "secret", "model").accept([1]))
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
        stranger = await asyncio.to_thread(socket.create_connection, address, 5.0)
        stranger.sendall(noise)
        stranger.close()
    connection = await asyncio.to_thread(join_master, address, "secret", 1, "model", 5.0)
    assert take(await accepting) == {1}
    connection.close()


def test_nobody_there_is_said_in_time():
    with pytest.raises(ConfigurationError, match="No first machine"):
        join_master(("127.0.0.1", free_port()), "secret", 1, "model", 0.0)


def test_master_listens_on_the_given_address_alone():
    with listen("127.0.0.1", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="cannot be listened on"):
        MasterListener(("192.0.2.1", 5), "", "")
