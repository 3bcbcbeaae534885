"""A rank in a process of its own: `python -m runtime.distributed.worker_process LINK PARENT`, started by the engine.

It reads a setup and then batches from its link, and lives no longer than the process at the other end.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from runtime.distributed.group_runner import decode_batch
from runtime.distributed.link import LinkClosed, WorkerLink, encode
from runtime.distributed.rendezvous import Rendezvous

if TYPE_CHECKING:
    from runtime.worker.model_runner import StepExecutor

PR_SET_PDEATHSIG = 1
FAREWELL_S = 1.0  # for a worker whose link has closed to end by itself


def main(link_fd: int, parent: int, path: str | None = None) -> int:
    """Work until the link closes; returns the exit status. What is raised goes to the engine as text.

    `path` is where this machine has the checkpoint, when that is not the engine's machine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine gets it too, and ends us in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # inherited where the parent ignores it
    _die_with_parent(parent)
    end = socket.socket(fileno=link_fd)
    end.setblocking(True)
    link = WorkerLink(end)
    threading.Thread(target=_leave_on_hang_up, args=(link.fileno(),), daemon=True).start()
    try:
        _work(link, path)
    except LinkClosed:
        return 0
    except BaseException:  # the process border: the engine raises it again, with this traceback
        _tell(link, traceback.format_exc())
        return 1
    return 0


def _work(link: WorkerLink, path: str | None) -> None:
    import torch

    from runtime.worker.worker import CacheSetup, ModelWorker, WorkerSetup

    setup = WorkerSetup.decode(link.receive().body["setup"], path)
    if setup.model.device.startswith("cuda"):
        torch.cuda.set_device(setup.model.device)
    worker = ModelWorker(setup)
    link.send(encode({"loaded": True}))
    link.receive()  # every rank and every replica has loaded its weights
    link.send(encode({"memory": worker.memory()}))
    join = link.receive().body["join"]
    rendezvous = Rendezvous(**join["rendezvous"])
    worker.join(CacheSetup(**join["cache"]), rendezvous, address=link.address)
    link.send(encode({"joined": True}))
    executor = worker.follow()
    link.send(encode({"ready": True}))
    if worker.mesh.rank_info.is_first_stage:
        _follow(link, executor)
    while True:
        executor.relay(decode_batch(link.receive()))


def _follow(link: WorkerLink, executor: StepExecutor) -> NoReturn:
    """Do as rank 0 does: in a pipeline, a step's beginning and its end are told apart."""
    while True:
        frame = link.receive()
        if "batch" in frame.body:
            executor.begin(decode_batch(frame))
        if not executor.pipelined or "end" in frame.body:
            executor.follow()


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the parent goes, where it can; the link's end says the same anyway."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave_on_hang_up(link_fd: int) -> None:
    """End the process when the other end closed while this one computes, or waits for ranks that are gone."""
    poll = select.poll()
    poll.register(link_fd, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    time.sleep(FAREWELL_S)
    os._exit(1)


def _tell(link: WorkerLink, trace: str) -> None:
    sys.stderr.write(trace)
    try:
        link.send(encode({"failed": trace}))
    except LinkClosed:
        return


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of groups whose other ranks may be gone
