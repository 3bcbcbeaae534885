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
from collections import deque
from typing import TYPE_CHECKING, Any

from runtime.batch import Batch
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.distributed.link import LinkClosed, WorkerLink
from runtime.distributed.message import Frame, decode_batch, encode

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.worker.forward_batch import StepInputs
    from runtime.worker.rank import Rank

PR_SET_PDEATHSIG = 1
FAREWELL_S = 1.0  # for a worker whose link has closed to end by itself


def main(link_fd: int, parent: int, path: str | None = None) -> int:
    """Work until the link closes; returns the exit status. What is raised goes to the engine as text.

    `path` is where this machine has the checkpoint, when that is not the engine's machine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine gets it too, and ends us in order
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

    from runtime.worker.device import open_device
    from runtime.worker.rank import Rank
    from runtime.worker.worker import Member

    setup = _setup(link.receive(), path)
    if setup["model"].device.startswith("cuda"):
        torch.cuda.set_device(setup["model"].device)
    member = Member(setup)
    link.send(encode({"loaded": member.memory()}))
    join = link.receive().body["join"]
    join["address"] = link.address or join["address"]
    pool = member.join(join)
    model = member.take_model()
    device = open_device(member.device)
    rank = Rank(model, pool, model, num_slots=join["num_slots"], device=device, mesh=member.mesh)
    link.send(encode({"ready": True}))
    with torch.inference_mode(), device.forward():
        if not member.mesh.place.first:
            while True:
                rank.relay(decode_batch(link.receive()))
        _follow(link, rank, pipelined=member.mesh.place.pp_size > 1)


def _follow(link: WorkerLink, rank: Rank, *, pipelined: bool) -> None:
    """Do as the first rank does: in a pipeline, a step's beginning and its end are told apart."""
    begun: deque[tuple[Batch, StepInputs, Tensor | None]] = deque()
    while True:
        frame = link.receive()
        if "batch" in frame.body:
            batch = decode_batch(frame)
            begun.append((batch, *rank.begin(batch)))
        if not pipelined or "end" in frame.body:
            rank.follow(*begun.popleft())


def _setup(frame: Frame, path: str | None) -> dict[str, Any]:
    body = frame.body["setup"]
    here = {} if path is None else {"path": path}
    facts = {**body["facts"], **here, "eos_ids": frozenset(body["facts"]["eos_ids"])}
    return {**body, "facts": ModelFacts(**facts), "model": ModelPlan(**{**body["model"], **here})}


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
