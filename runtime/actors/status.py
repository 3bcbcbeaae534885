"""The state and the load of an engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.kv_cache.host_tier import TierCounts
from runtime.kv_cache.storage_tier import StorageCounts

State = Literal["starting", "ready", "draining", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State and current load of the engine. Loads are sums over all live replicas."""

    state: State
    num_running: int
    num_waiting: int
    num_requests: int
    num_pages: int
    num_used_pages: int  # pages used by running sequences
    num_cached_pages: int  # pages used only by the prefix tree
    page_size: int
    num_used_tokens: int
    max_total_tokens: int
    num_retracted: int  # retractions since the start
    num_recomputed: int  # tokens recomputed after retractions, since the start
    num_swapped_out: int  # pages copied to host memory for retracted sequences, since the start
    num_swapped_in: int  # pages copied back to the device, since the start
    host_tier: TierCounts  # pages of the prefix tree in host memory
    storage: StorageCounts  # pages in storage
    num_forced: int  # forced tokens (see `runtime.scheduler.fast_forward`) that saved a step each, since the start
    num_steps: int
    num_generated: int
    gen_throughput: float
    kernels: str = ""  # name of the kernels that compute the model
    step_age_s: float = 0.0  # seconds since the oldest step in flight began; 0.0 if there is none
    predicted_step_s: float | None = None  # predicted time of this step; None if unknown or if no step is in flight
    hangs: bool = False  # whether the oldest step in flight takes much longer than predicted
    queue_space: int = 0  # number of further sequences that the queue accepts
    estimated_wait_s: float = 0.0  # expected seconds until a new request runs

    def __repr__(self) -> str:
        """Return one line with the most important counts."""
        space = "no limit" if self.queue_space > 2**31 else f"room for {self.queue_space}"
        pages = f"{self.num_used_pages} of {self.num_pages} pages in use, {self.num_cached_pages} kept for prefixes"
        queue = f"{self.num_running} running, {self.num_waiting} waiting ({space})"
        done = f"{self.num_steps} steps, {self.num_generated} tokens, {self.gen_throughput:.1f} tokens/s"
        return f"Status({self.state}: {queue}; {pages}; {done})"


def status_of(scheduler: SchedulerActor | Router, state: State, num_requests: int, page_size: int) -> Status:
    """Return the current status of an engine with this scheduler."""
    alive = scheduler.alive
    loads = [actor.scheduler.load for actor in alive]
    num_pages = sum(load.num_pages for load in loads)
    return Status(
        state=state,
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_requests=num_requests,
        num_pages=num_pages,
        num_used_pages=sum(load.num_used_pages for load in loads),
        num_cached_pages=sum(load.num_evictable_pages for load in loads),
        page_size=page_size,
        num_used_tokens=sum(load.num_used_tokens for load in loads),
        max_total_tokens=num_pages * page_size,
        num_retracted=sum(load.num_retracted for load in loads),
        num_recomputed=sum(load.num_recomputed for load in loads),
        num_swapped_out=sum(load.num_swapped_out for load in loads),
        num_swapped_in=sum(load.num_swapped_in for load in loads),
        host_tier=TierCounts(*map(sum, zip(*(load.tier for load in loads), strict=True))),
        storage=StorageCounts(*map(sum, zip(*(load.storage for load in loads), strict=True))),
        num_forced=sum(load.num_forced for load in loads),
        num_steps=sum(actor.progress.num_steps for actor in alive),
        num_generated=sum(actor.progress.num_generated for actor in alive),
        gen_throughput=sum(actor.progress.gen_throughput for actor in alive),
        kernels=alive[0].runner.kernels_description if alive else "",
        step_age_s=max((actor.steps.age_s for actor in alive), default=0.0),
        predicted_step_s=max((s for actor in alive if (s := actor.steps.predicted_s) is not None), default=None),
        hangs=any(actor.steps.hangs for actor in alive),
        queue_space=max(0, scheduler.queue_space),
        estimated_wait_s=scheduler.wait_s,
    )
