"""Only a machine that knows the token, has the model and is missing gets in; both sides prove it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from runtime.distributed.rendezvous import Gate, listen, report
from runtime.distributed.spawn import Worker
from runtime.errors import ConfigurationError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


async def meet(*, rank: int = 1, token: str = "secret", model: str = "model") -> list[Worker]:
    """Rank 1 is missing; this rank reports, and its outcome is raised."""
    address = ("127.0.0.1", free_port())
    admitting = asyncio.create_task(Gate(address, "secret", "model").admit([1]))
    try:
        connection = await asyncio.to_thread(report, address, token, rank, model, 5.0)
        connection.close()
        return await admitting
    finally:
        admitting.cancel()
        with suppress(asyncio.CancelledError):
            await admitting


async def test_rank_that_proves_itself_is_taken():
    [worker] = await meet()
    assert worker.rank == 1
    worker.detach()


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
    admitting = asyncio.create_task(Gate(address, "another secret", "model").admit([1]))
    with pytest.raises(ConfigurationError):
        await asyncio.to_thread(report, address, "secret", 1, "model", 5.0)
    admitting.cancel()
    with suppress(asyncio.CancelledError):
        await admitting


async def test_strangers_do_not_keep_a_rank_out():
    address = ("127.0.0.1", free_port())
    admitting = asyncio.create_task(Gate(address, "secret", "model").admit([1]))
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
        stranger = await asyncio.to_thread(socket.create_connection, address, 5.0)
        stranger.sendall(noise)
        stranger.close()
    connection = await asyncio.to_thread(report, address, "secret", 1, "model", 5.0)
    [worker] = await admitting
    worker.detach()
    connection.close()


def test_nobody_there_is_said_in_time():
    with pytest.raises(ConfigurationError, match="no first machine"):
        report(("127.0.0.1", free_port()), "secret", 1, "model", 0.0)


def test_gate_listens_on_the_given_address_alone():
    with listen("127.0.0.1", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="cannot be listened on"):
        Gate(("192.0.2.1", 5), "", "")
