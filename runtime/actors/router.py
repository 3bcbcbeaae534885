"""Data-parallel router: assigns requests to replicas, restarts a failed replica and moves its requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio

from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.prefill_replicas import PrefillReplicas
from runtime.actors.scheduler import SchedulerActor
from runtime.errors import EngineFailure
from runtime.scheduler.apply import final_delta

if TYPE_CHECKING:
    from runtime.actors.replica import Replica
    from runtime.metrics.series import EngineMetrics

logger = logging.getLogger("penstock.core")

MAX_RESTARTS = 3  # failed attempts to restart a replica before it is abandoned
RESTART_RETRY_S = 10  # seconds after which clients should retry while no replica is alive
RESTART_DELAY_S = 1.0  # wait before the second attempt; it doubles for each further attempt

# `longest_prefix` only chooses a replica that has at most 2 * n + PREFIX_SLACK requests, if the least busy replica has
# n. The prefix of many requests is then computed on a second replica too, and both replicas can serve it.
PREFIX_SLACK = 8


class ReplicaLoad(NamedTuple):
    """The load of one replica when a new request arrives."""

    num_requests: int  # requests of the replica that have not ended
    num_tokens: int  # prompt and output tokens of these requests
    num_cached: int  # tokens of the new prompt in the replica's prefix cache


# Chooses a replica: maps the loads of the live replicas to the index of one of them.
BalancePolicy = Callable[[Sequence[ReplicaLoad]], int]


class Router:
    """Routes requests to the scheduler actors of all replicas, which run on one event loop.

    A failed replica is closed and restarted. Its requests without output move to the other replicas; its requests with
    output fail. After the restart, the replica gets a share of the waiting requests. A replica is given up after
    several failed restarts, and the engine fails when no replica for requests is left. Without `start_replica`, the
    engine fails when any replica fails.

    If the plan has prefill replicas, they have the lowest indices. Requests are routed only to the remaining replicas,
    which are the decode replicas. The prefill replicas compute the prompts of these requests (see `PrefillReplicas`).
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        start_replica: Callable[[int], Awaitable[Replica]] | None,
        balance_method: str,
        requests: LiveRequests,
        detokenizer: DetokenizerActor,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._start_replica = start_replica
        self._policy = balance_policy(balance_method)
        self._requests = requests
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._max_queued = replicas[0].plan.scheduler.max_queued
        plan = replicas[0].plan
        self._num_prefill = plan.parallel.prefill_replicas
        self._prompts = PrefillReplicas(plan.cache.page_size) if self._num_prefill else None
        if self._prompts is not None:
            requests.observe(self._prompts)
        self._given_up: set[int] = set()  # indices of the replicas that will not be restarted
        # Scheduler actor of each replica, by replica index. None while the replica restarts and after it is given up.
        self._schedulers: list[SchedulerActor | None] = [
            self._actor(index, replica) for index, replica in enumerate(replicas)
        ]

    @property
    def alive(self) -> list[SchedulerActor]:
        return [scheduler for scheduler in self._schedulers if scheduler is not None]

    @property
    def _decoding(self) -> list[SchedulerActor]:
        """The live replicas to which requests are routed: all except the prefill replicas."""
        return [scheduler for scheduler in self._schedulers[self._num_prefill :] if scheduler is not None]

    @property
    def queue_space(self) -> int:
        """Number of further choices that the queues accept.

        While no replica is alive, requests wait in the router.
        """
        if alive := self._decoding:
            return sum(scheduler.queue_space for scheduler in alive)
        return self._max_queued - sum(len(live.sequences) for live in self._requests)

    @property
    def least_urgency(self) -> float:
        """Lowest urgency of the waiting requests on all replicas.

        Infinity if there are none or if priorities are off.
        """
        return min((scheduler.least_urgency for scheduler in self._decoding), default=math.inf)

    @property
    def wait_s(self) -> float:
        """Shortest expected wait of a new request on any replica, in seconds; 0.0 if no replica is alive."""
        return min((scheduler.wait_s for scheduler in self._decoding), default=0.0)

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a refused client should retry."""
        return min((scheduler.retry_after_s for scheduler in self._decoding), default=RESTART_RETRY_S)

    def admit(self, live: LiveRequest) -> None:
        """Assign a request to a replica, or to the first one that restarts if none is alive."""
        alive = self._decoding
        if alive:
            chosen = alive[self._policy(self._loads(alive, live)) if len(alive) > 1 else 0]
            if self._prompts is not None:
                prefill = [scheduler for scheduler in self._schedulers[: self._num_prefill] if scheduler is not None]
                self._prompts.start(live, prefill, chosen)
            chosen.admit(live)

    async def run(self) -> None:
        """Run all replicas until cancelled. Raises `EngineFailure` when no replica is left, or an actor's exception."""
        async with anyio.create_task_group() as replicas:
            for index in range(len(self._schedulers)):
                replicas.start_soon(self._run_replica, index)

    async def _run_replica(self, index: int) -> None:
        """Run a replica, and restart it after each failure until it is given up."""
        while scheduler := self._schedulers[index]:
            try:
                await scheduler.run()
            except EngineFailure as error:
                start_replica = self._start_replica
                if start_replica is None:
                    raise
                logger.error("Replica %d failed: %s", index, error.message)
                self._schedulers[index] = None
                self._move_requests(scheduler, error)
                await self._close(index, scheduler)
                if not await self._restart(index, start_replica):
                    self._given_up.add(index)
                if self._given_up.issuperset(range(self._num_prefill, len(self._schedulers))):
                    raise

    async def _close(self, index: int, scheduler: SchedulerActor) -> None:
        try:
            await scheduler.close()
        except Exception:  # an error while closing must not end the healthy replicas
            logger.exception("Replica %d could not be closed.", index)

    async def _restart(self, index: int, start_replica: Callable[[int], Awaitable[Replica]]) -> bool:
        """Restart a replica, with several attempts. Return False if every attempt failed."""
        for attempt in range(MAX_RESTARTS):
            if attempt:
                await anyio.sleep(RESTART_DELAY_S * 2 ** (attempt - 1))
            try:
                replica = await start_replica(index)
            except Exception:  # a failed start must not end the healthy replicas
                logger.exception("Replica %d could not be restarted.", index)
                continue
            self._schedulers[index] = restarted = self._actor(index, replica)
            logger.warning("Replica %d is alive again.", index)
            if index < self._num_prefill:
                return True
            for live in self._requests:
                if live.sequences and live.scheduler is None:
                    self.admit(live)
            self._rebalance_waiting(restarted)
            return True
        logger.critical("Replica %d is given up.", index)
        return False

    def _rebalance_waiting(self, restarted: SchedulerActor) -> None:
        """Move waiting requests to a restarted replica, so that all replicas have about equally many."""
        waiting: dict[object, list[LiveRequest]] = {scheduler: [] for scheduler in self._decoding}
        for live in self._requests:
            if live.scheduler in waiting and live.waits and live.aborting is None:
                waiting[live.scheduler].append(live)
        share = sum(map(len, waiting.values())) // len(waiting)

        def admit(live: LiveRequest) -> None:
            if restarted in self._schedulers:
                restarted.admit(live)
            else:
                self.admit(live)

        for scheduler in self._decoding:
            for live in waiting[scheduler][share:]:
                if scheduler is not restarted:
                    scheduler.give_back(live, admit)

    def _move_requests(self, dead: SchedulerActor, error: EngineFailure) -> None:
        """Move the requests of a dead replica to other replicas. Requests that already have output fail instead."""
        if self._prompts is not None:
            self._prompts.give_up(dead, self._requests)
        for live in self._requests:
            if live.scheduler is not dead:
                continue
            live.scheduler = None
            if self._prompts is not None:
                self._prompts.stop(live)
            if live.aborting is not None:
                finish = live.aborting
                self._detokenizer.inbox.put([final_delta(sequence, finish) for sequence in live.sequences])
            elif live.has_output:
                self._requests.fail(live.request.id, type(error)(error.message))
            else:
                live.sequences = [sequence.restarted() for sequence in live.sequences]
                self.admit(live)

    def _loads(self, alive: Sequence[SchedulerActor], new: LiveRequest) -> list[ReplicaLoad]:
        counts: dict[object, list[int]] = {scheduler: [0, 0] for scheduler in alive}
        for live in self._requests:
            if live.scheduler in counts:
                count = counts[live.scheduler]
                count[0] += 1
                count[1] += sum(s.num_tokens for s in live.sequences if s.finish is None)
        return [ReplicaLoad(*counts[actor], num_cached=actor.scheduler.num_cached(new.sequences[0])) for actor in alive]

    def _actor(self, index: int, replica: Replica) -> SchedulerActor:
        return SchedulerActor.of(replica, self._requests, self._detokenizer, index=index, metrics=self._metrics)


def balance_policy(method: str) -> BalancePolicy:
    """Return the policy that `--load-balance-method` names. Raises KeyError for an unknown name."""
    return {
        "round_robin": _RoundRobin,
        "shortest_queue": lambda: shortest_queue,
        "minimum_tokens": lambda: minimum_tokens,
        "longest_prefix": lambda: longest_prefix,
    }[method]()


class _RoundRobin:
    """Balance policy that chooses the replicas in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, replicas: Sequence[ReplicaLoad]) -> int:
        return next(self._turns) % len(replicas)


def shortest_queue(replicas: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the fewest requests; on a tie, the one with the fewest tokens."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_requests, replicas[i].num_tokens))


def minimum_tokens(replicas: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the fewest tokens; on a tie, the one with the fewest requests."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_tokens, replicas[i].num_requests))


def longest_prefix(replicas: Sequence[ReplicaLoad]) -> int:
    """Return the index of the replica with the longest cached prefix. If it is too busy, apply `minimum_tokens`."""
    best = max(
        range(len(replicas)),
        key=lambda i: (replicas[i].num_cached, -replicas[i].num_tokens, -replicas[i].num_requests),
    )
    idlest = min(replica.num_requests for replica in replicas)
    if replicas[best].num_cached and replicas[best].num_requests <= 2 * idlest + PREFIX_SLACK:
        return best
    return minimum_tokens(replicas)
