"""The process of one rank, which the engine starts as `python -m runtime.distributed.worker_process LINK PARENT`.

It reads a setup and then batches from its link. It ends when the engine at the other end of the link ends.
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
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from runtime.distributed.group_runner import decode_batch, decode_share
from runtime.distributed.link import Frame, LinkClosed, WorkerLink, encode
from runtime.distributed.numa import bind_worker
from runtime.distributed.verb_call import REFUSALS, decode_payload, encode_answer, encode_refusal
from runtime.mesh.rendezvous import Rendezvous

if TYPE_CHECKING:
    from runtime.worker.model_runner import StepExecutor

PR_SET_PDEATHSIG = 1
EXIT_DELAY_S = 1.0  # after its link has closed, a worker has this many seconds to end by itself


def main(link_fd: int, parent: int, path: str | None = None) -> int:
    """Serve the link until it closes, and return the exit status. Exceptions are sent to the engine as text.

    `path` is the path of the checkpoint on this machine, if the engine runs on another machine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C, and then ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # undoes the parent's handler, which is inherited
    _die_with_parent(parent)
    bind_worker()
    end = socket.socket(fileno=link_fd)
    end.setblocking(True)
    link = WorkerLink(end)
    threading.Thread(target=_exit_on_hang_up, args=(link.fileno(),), daemon=True).start()
    try:
        _work(link, path)
    except LinkClosed:
        return 0
    except BaseException:  # the engine raises it with this traceback
        _report(link, traceback.format_exc())
        return 1
    return 0


def _work(link: WorkerLink, path: str | None) -> None:
    import torch

    from runtime.worker.worker import ModelWorker
    from runtime.worker.worker_setup import TARGET, CacheSetup, WorkerSetup

    setup = WorkerSetup.decode(link.receive().body["setup"], path)
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(setup.device)
    worker = ModelWorker(setup)
    link.send(encode({"loaded": True}))
    link.receive()  # waits until all ranks and replicas have loaded their weights
    link.send(encode({"memory": worker.memory()}))
    join = link.receive().body["join"]
    rendezvous = Rendezvous(**join["rendezvous"])
    worker.join(CacheSetup(**join["cache"]), rendezvous, address=link.address)
    link.send(encode({"joined": True}))
    executor = worker.follow(TARGET)
    common = worker.common_step
    link.send(encode({"ready": True}))
    is_first_stage = worker.mesh.rank_info.is_first_stage
    while True:
        frame = link.receive()
        if "verb" in frame.body:
            _answer(link, executor, frame)
        elif common is not None:
            common.take_part(*decode_share(frame))
        elif is_first_stage:
            _follow(executor, frame)
        else:
            executor.relay(decode_batch(frame))


def _follow(executor: StepExecutor, frame: Frame) -> None:
    """Run the batch in a frame. With pipeline parallelism, the begin and the end of a step are separate frames."""
    if "batch" in frame.body:
        executor.begin(decode_batch(frame))
    if not executor.pipelined or "end" in frame.body:
        executor.follow()


def _answer(link: WorkerLink, executor: StepExecutor, frame: Frame) -> None:
    """Run a verb (see `runtime.worker.verbs`) and send its answer. Any exception except a refusal ends this rank."""
    from runtime.worker.verbs import run_verb

    number, verb = frame.body["call"], frame.body["verb"]

    def send(answer: Callable[[], Any]) -> None:
        try:
            link.send(encode_answer(number, answer()))
        except REFUSALS as error:
            link.send(encode_refusal(number, error))

    def send_later(done: Future[Any]) -> None:
        try:
            send(done.result)
        except BaseException:  # this thread would hide the error, and the engine would wait forever for the answer
            _report(link, traceback.format_exc())
            os._exit(1)

    try:
        answer = run_verb(executor.rank, verb, decode_payload(frame))
    except REFUSALS as error:
        link.send(encode_refusal(number, error))
        return
    if isinstance(answer, Future):
        answer.add_done_callback(send_later)
    else:
        send(lambda: answer)


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux). Elsewhere, it ends when the link closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_on_hang_up(link_fd: int) -> None:
    """End the process after its link has closed, even while it computes or waits for other ranks."""
    poll = select.poll()
    poll.register(link_fd, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    time.sleep(EXIT_DELAY_S)
    os._exit(1)


def _report(link: WorkerLink, trace: str) -> None:
    sys.stderr.write(trace)
    try:
        link.send(encode({"failed": trace}))
    except LinkClosed:
        return


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    sys.stderr.flush()
    os._exit(status)  # does not wait for threads of process groups, which may wait for ranks that have ended
