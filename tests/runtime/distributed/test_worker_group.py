"""One worker process: the descriptors that it inherits, and how its end is reported."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

import fake_core
from runtime.config.plan import ParallelPlan
from runtime.distributed.link import encode
from runtime.distributed.worker_group import RemoteError, WorkerGroup, WorkerProcess
from runtime.errors import WorkerFailed

NONSENSE = {
    "setup": {
        "rank_info": {"rank": 1, "tp_size": 2},
        "models": {"target": {"facts": {"eos_ids": [], "no such field": 1}, "plan": {"path": ""}}},
        "kernels": {"choices": {}, "settings": {}},
    }
}


def started(rank: int) -> WorkerProcess:
    ours, theirs = socket.socketpair()
    worker = WorkerProcess(rank, ours)
    worker.start(theirs)
    return worker


async def test_what_a_worker_raises_is_raised_where_it_is_awaited_with_its_traceback():
    worker = started(3)
    worker.send(encode(NONSENSE))
    with pytest.raises(WorkerFailed, match=r"Rank 3 \(process \d+\) failed") as caught:
        await worker.receive()
    assert isinstance(caught.value.__cause__, RemoteError)
    assert "Traceback" in str(caught.value.__cause__)
    assert "no such field" in str(caught.value.__cause__)
    assert "no such field" not in caught.value.message
    worker.close_link()
    assert not psutil.pid_exists(worker.process_id or 0)


async def test_worker_ends_with_its_link():
    worker = started(1)
    worker.close_link()
    await asyncio.to_thread(worker.reap)
    assert not psutil.pid_exists(worker.process_id or 0)


async def test_worker_that_sends_what_is_no_message_is_named_with_the_reason():
    ours, theirs = socket.socketpair()
    worker = WorkerProcess(2, ours, "10.0.0.7")
    theirs.sendall(b"\xff" * 64)
    with pytest.raises(WorkerFailed, match=r"Rank 2 \(on 10.0.0.7\) sent an invalid message") as caught:
        await worker.receive()
    assert isinstance(caught.value.__cause__, ValueError)
    theirs.close()


async def test_a_group_names_the_failed_rank_and_ends_the_others():
    group = WorkerGroup()
    await group.start(ParallelPlan(tp_size=3), fake_core.make_facts(), {})
    watching = asyncio.create_task(group.watch(lambda rank, frame: None))
    group.workers[1].kill()
    with pytest.raises(WorkerFailed, match=r"Rank 2 .* was killed by SIGKILL"):
        await watching
    assert "Rank 2" in group.failure.result().message
    await group.close()
    assert not any(psutil.pid_exists(worker.process_id or 0) for worker in group.workers)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_worker_inherits_no_socket_but_its_link():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        worker = started(1)
        files = Path(f"/proc/{worker.process_id}/fd")
        links = [os.readlink(file) for file in files.iterdir()]
        assert len([link for link in links if link.startswith("socket:")]) == 1
        worker.close_link()
        await asyncio.to_thread(worker.reap)
