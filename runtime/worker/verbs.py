"""Verbs: commands that `Runner.call` runs by name, on every rank, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from runtime.batch import PageCopy
from runtime.errors import InvalidRequest
from runtime.profile import ProfileOptions
from runtime.worker.adapters import Adapters
from runtime.worker.expert_verbs import EXPERT_VERBS
from runtime.worker.page_io import PageIO
from runtime.worker.rank_state import RankState
from runtime.worker.step_profiler import StepProfiler
from runtime.worker.weight_verbs import WEIGHT_VERBS

# A verb runs on the thread that enqueues steps. It may raise `InvalidRequest` or `CheckpointError` only before it has
# changed anything. If the answer is a `concurrent.futures.Future`, steps continue until it is done.
Verb = Callable[[RankState, Mapping[str, Any]], Any]


def run_verb(rank: RankState, verb: str, payload: Mapping[str, Any]) -> Any:
    """Run the verb of this name. Return the rank's answer, which consists of JSON values.

    Raises `InvalidRequest` if no verb has this name.
    """
    if verb not in VERBS:
        raise InvalidRequest(f"The verb {verb} is unknown.")
    return VERBS[verb](rank, payload)


def start_profile(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Profile the next steps of rank 0. Raises `InvalidRequest` if a profile is running."""
    if not rank.leads:
        return
    if rank.profiler is not None and rank.profiler.running:
        raise InvalidRequest("A profile is running already. Stop it first.")
    options = ProfileOptions(**{**payload, "path": Path(payload["path"])})
    rank.profiler = StepProfiler(options, on_cuda=not rank.device.is_host)
    rank.profiler.start()


def stop_profile(rank: RankState, payload: Mapping[str, Any]) -> Future[Path] | None:
    """End the profile of rank 0. Return a future of the trace's path, or None if no profile was started."""
    profiler, rank.profiler = rank.profiler, None
    if profiler is None:
        return None
    if profiler.running:
        profiler.stop()
    return profiler.written


def load_adapter(rank: RankState, payload: Mapping[str, Any]) -> Future[bool]:
    """Read an adapter into the host memory of this rank, on a thread.

    The result says whether the adapter must be measured (DoRA). Raises CheckpointError if the adapter does not fit.
    """
    return _adapters(rank).load(payload["id"], payload["path"])


def measure_adapter(rank: RankState, payload: Mapping[str, Any]) -> bool:
    """Measure one more layer of a loaded adapter (DoRA). Return whether layers remain to be measured."""
    with torch.inference_mode(), rank.device.forward():
        is_left = _adapters(rank).measure(payload["id"])
        rank.device.record().wait()
    return is_left


def drop_adapter(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Free the host memory of an adapter. Unknown ids are ignored."""
    _adapters(rank).drop(payload["id"])


def copy_pages(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Copy pages between pools, outside a step.

    "pools" lists (source, target) of each copy. "from_0" and "to_0" are the pages of the first copy, and so on.
    """
    if rank.copier is None:
        raise InvalidRequest("This rank copies no pages.")
    copies = [
        PageCopy(source, target, payload[f"from_{number}"], payload[f"to_{number}"])
        for number, (source, target) in enumerate(payload["pools"])
    ]
    with torch.inference_mode(), rank.device.forward():
        rank.copier.enqueue(copies)


def attach_storage(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Open a page store for the host pages. Raises `InvalidRequest` if the store cannot be used."""
    _pages(rank).attach(payload["backend"], payload["name"], payload["config"], same=payload["same"])


def detach_storage(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Close the page store."""
    _pages(rank).detach()


def load_pages(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, int]]:
    """Read pages of the store into host pages, on a thread (see `PageIO.load`)."""
    return _pages(rank).load(_keys(payload), payload["pages"].tolist())


def save_pages(rank: RankState, payload: Mapping[str, Any]) -> Future[dict[str, int]]:
    """Write host pages to the store, on a thread (see `PageIO.save`)."""
    return _pages(rank).save(_keys(payload), payload["pages"].tolist())


def delete_pages(rank: RankState, payload: Mapping[str, Any]) -> Future[None]:
    """Remove pages from the store, on a thread."""
    return _pages(rank).delete(_keys(payload))


def clear_storage(rank: RankState, payload: Mapping[str, Any]) -> Future[None]:
    """Remove all pages of this rank from the store, on a thread."""
    return _pages(rank).clear()


def note_prompts(rank: RankState, payload: Mapping[str, Any]) -> None:
    """Tell the store of a prefill server about its prompts and pages (see `OfferedPages.note_prompts`)."""
    _pages(rank).note_prompts(*(_keys(payload, name) for name in ("begun", "ended", "stored")))


def _keys(payload: Mapping[str, Any], name: str = "keys") -> list[bytes]:
    return [bytes.fromhex(key) for key in payload[name]]


def _pages(rank: RankState) -> PageIO:
    if rank.pages is None:
        raise InvalidRequest("Storage needs a host tier whose pages are blocks; see --hicache-mem-layout.")
    return rank.pages


def _adapters(rank: RankState) -> Adapters:
    if rank.adapters is None:
        raise InvalidRequest("Adapters are off; start the server with --enable-lora.")
    return rank.adapters


# Verbs that use only host memory which no launched step uses. On a CPU, they need not wait for the steps.
HOST_VERBS = frozenset(("save_pages", "note_prompts"))

VERBS: Mapping[str, Verb] = {
    "start_profile": start_profile,
    "stop_profile": stop_profile,
    **WEIGHT_VERBS,
    **EXPERT_VERBS,
    "load_adapter": load_adapter,
    "measure_adapter": measure_adapter,
    "drop_adapter": drop_adapter,
    "copy_pages": copy_pages,
    "attach_storage": attach_storage,
    "detach_storage": detach_storage,
    "load_pages": load_pages,
    "save_pages": save_pages,
    "delete_pages": delete_pages,
    "clear_storage": clear_storage,
    "note_prompts": note_prompts,
}
