"""One worker process: what it inherits, and how its end is told."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

from runtime.distributed.link import encode
from runtime.distributed.worker_group import RemoteError, WorkerProcess
from runtime.errors import WorkerFailed

NONSENSE = {
    "setup": {
        "rank_info": {"rank": 1, "tp_size": 2},
        "facts": {"eos_ids": [], "no such field": 1},
        "model": {},
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
