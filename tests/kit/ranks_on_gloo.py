"""Ranks of one model in threads of one process, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch

from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.mesh.rendezvous import Rendezvous

TIMEOUT_S = 120


def on_ranks(folder: Path, infos: Sequence[RankInfo], work: Callable[[Mesh], Any]) -> list[Any]:
    """Run work(mesh) on all ranks at the same time."""
    done = Barrier(len(infos), timeout=TIMEOUT_S)

    def run(info: RankInfo) -> Any:
        mesh = Mesh(info, torch.device("cpu"))
        try:
            mesh.join(Rendezvous(host="127.0.0.1", timeout_s=TIMEOUT_S, path=str(folder / "store")))
            result = work(mesh)
        except BaseException:
            done.abort()
            mesh.abort()
            raise
        done.wait()  # no message is in flight any more
        mesh.close()
        return result

    with ThreadPoolExecutor(len(infos)) as pool:
        futures = [pool.submit(run, info) for info in infos]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [each.result() for each in futures]
