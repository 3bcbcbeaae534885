"""The copies of the model in one engine: who gets which request, and what becomes of those of a dead one."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from runtime.actors.balance import Standing, chooser
from runtime.actors.replica import Replica
from runtime.actors.scheduler import Abort, Admit, Progress, SchedulerActor, StopEarly
from runtime.errors import EngineFailure, PenstockError
from runtime.request import Delta, Finish
from runtime.scheduler.apply import final_delta
from runtime.scheduler.scheduler import Load
from runtime.sequence import Sequence

logger = logging.getLogger("penstock.core")

WATCHDOG_PERIOD_S = 1.0
CLOSE_TIMEOUT_S = 30.0
MAX_RESTARTS = 3  # in a row; a replica that fails so often is given up
RESTART_DELAY_S = 1.0  # before the second attempt, doubled with every further one

Renew = Callable[[int], Awaitable[Replica]]  # a new replica for a place


@dataclass(slots=True, eq=False)
class _Member:
    """A replica's place, its scheduler actor while it lives, and the requests that it has."""

    place: int
    replica: Replica | None
    actor: SchedulerActor | None = None
    homes: dict[int, _Home] = field(default_factory=dict)  # by request id

    def standing(self, sequence: Sequence) -> Standing:
        alive = [s for home in self.homes.values() for s in home.sequences if s.finish is None]
        cached = self.replica.schedule.num_cached(sequence) if self.replica is not None else 0
        return Standing(len(self.homes), sum(s.num_tokens for s in alive), cached)


@dataclass(slots=True, eq=False)
class _Home:
    """Where a request is."""

    member: _Member | None  # None: nowhere, until a replica is alive again
    sequences: list[Sequence]
    begun: bool = False  # some of its output went out
    ending: Finish | None = None  # it was aborted, which its replica may not have done yet


class Router:
    """One scheduler actor for each replica, all on one loop.

    With one replica, its failure is the engine's. With several, a failed one is drained and started again:
    requests of which nothing was sent yet go to the others, the rest fail with the reason. `emit` takes each
    step's deltas, `fail` a request id and the error for its sender.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        renew: Renew | None,
        method: str,
        *,
        emit: Callable[[list[Delta]], None],
        fail: Callable[[int, PenstockError], None],
    ) -> None:
        self._members = [_Member(place, replica) for place, replica in enumerate(replicas)]
        self._renew = renew
        self._choose = chooser(method)
        self._emit = emit
        self._fail = fail
        self._homes: dict[int, _Home] = {}
        for member in self._members:
            self._man(member)

    # --- messages ---

    def admit(self, sequences: list[Sequence]) -> None:
        """Give the sequences of one request to a replica; to the first that is alive again, if none is."""
        home = self._homes[sequences[0].request.id] = _Home(None, sequences)
        self._settle(home)

    def abort(self, request_id: int, finish: Finish) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        home = self._homes.get(request_id)
        if home is None:
            return
        home.ending = finish
        if home.member is not None and home.member.actor is not None:
            home.member.actor.inbox.put(Abort(request_id, finish))
        else:
            self._emit([final_delta(sequence, finish) for sequence in home.sequences])

    def stop_early(self, request_id: int, index: int) -> None:
        """Tell the replica that a choice was ended by its text."""
        home = self._homes.get(request_id)
        if home is not None and home.member is not None and home.member.actor is not None:
            home.member.actor.inbox.put(StopEarly(request_id, index))

    def forget(self, request_id: int) -> None:
        """The request has ended for everybody."""
        home = self._homes.pop(request_id, None)
        if home is not None and home.member is not None:
            home.member.homes.pop(request_id, None)

    def flush(self) -> bool:
        """Empty the prefix trees; False if one could not be, because something runs there."""
        flushed = [
            replica.schedule.flush() for replica in self.replicas
        ]  # every one, not up to the first False
        return all(flushed)

    @property
    def replicas(self) -> list[Replica]:
        """Those that are alive."""
        return [member.replica for member in self._members if member.replica is not None]

    @property
    def load(self) -> Load:
        """Of all replicas together."""
        loads = [replica.schedule.load for replica in self.replicas]
        if len(loads) == 1:
            return loads[0]
        sums = [sum(values) for values in zip(*loads)] if loads else [0] * len(Load._fields)
        total = Load(*sums)
        most = max(total.num_pages, 1), max(len(loads), 1)
        return total._replace(
            token_usage=total.num_used_pages / most[0], new_token_ratio=total.new_token_ratio / most[1]
        )

    @property
    def progress(self) -> list[Progress]:
        return [member.actor.progress for member in self._members if member.actor is not None]

    # --- life ---

    async def run(self) -> None:
        """Until cancelled. Raises `EngineFailure` when no replica is left, or an actor's mistake."""
        async with anyio.create_task_group() as living:
            for member in self._members:
                living.start_soon(self._keep, member)

    async def close(self) -> None:
        """Close every runner. A device that hangs is left behind: its thread is a daemon."""
        async with anyio.create_task_group() as closing:
            for member in self._members:
                closing.start_soon(self._bury, member)

    async def _keep(self, member: _Member) -> None:
        """Run a replica, over and over: each time it fails it is started again."""
        while True:
            try:
                await self._run_one(member)
            except EngineFailure as error:
                if self._renew is None:
                    raise
                logger.error("Replica %d failed: %s", member.place, error.message)
                self._evacuate(member, error)
                await self._bury(member)
                await self._restart(member, error)

    async def _run_one(self, member: _Member) -> None:
        if member.replica is None or member.actor is None:
            raise RuntimeError("A replica that is not there cannot run.")
        try:
            async with anyio.create_task_group() as parts:
                parts.start_soon(member.actor.run)
                parts.start_soon(member.replica.runner.watch)
                parts.start_soon(_watch_steps, member.actor, member.replica.plan.schedule.watchdog_timeout_s)
        except ExceptionGroup as group:
            failures = [error for error in group.exceptions if isinstance(error, EngineFailure)]
            if len(failures) < len(group.exceptions):  # a mistake of ours: the engine must not go on
                raise
            raise failures[0] from failures[0].__cause__

    def _evacuate(self, member: _Member, error: EngineFailure) -> None:
        """Nothing more comes from this replica: send its requests elsewhere, or fail them."""
        member.actor = None
        homes, member.homes = member.homes, {}
        for request_id, home in homes.items():
            home.member = None
            if home.ending is not None:
                self._emit([final_delta(sequence, home.ending) for sequence in home.sequences])
            elif home.begun:
                self._fail(request_id, type(error)(error.message))
            else:
                home.sequences = [_afresh(sequence) for sequence in home.sequences]
                self._settle(home)

    async def _bury(self, member: _Member) -> None:
        replica, member.replica = member.replica, None
        if replica is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await anyio.to_thread.run_sync(replica.runner.close, abandon_on_cancel=True)

    async def _restart(self, member: _Member, error: EngineFailure) -> None:
        if self._renew is None:
            raise error
        for attempt in range(MAX_RESTARTS):
            if attempt:
                await anyio.sleep(RESTART_DELAY_S * 2 ** (attempt - 1))
            try:
                member.replica = await self._renew(member.place)
            except PenstockError as again:
                logger.error("Replica %d could not be started again: %s", member.place, again)
                continue
            self._man(member)
            logger.warning("Replica %d is alive again.", member.place)
            for home in [home for home in self._homes.values() if home.member is None]:
                self._settle(home)
            return
        if not any(other.actor for other in self._members):
            raise error
        await anyio.sleep_forever()  # the others go on without it

    def _man(self, member: _Member) -> None:
        """Give a member with a replica its actor."""
        replica = member.replica
        if replica is None:
            raise RuntimeError("There is nothing to schedule for.")
        member.actor = SchedulerActor(
            replica.schedule,
            replica.runner,
            replica.plan.schedule,
            page_size=replica.plan.cache.page_size,
            emit=self._emit if self._renew is None else self._note_and_emit,
            fail=self._fail,
        )

    def _settle(self, home: _Home) -> None:
        """Choose a replica for a request that has none, if any is alive."""
        alive = [member for member in self._members if member.actor is not None]
        if not alive:
            return
        first = home.sequences[0]
        place = self._choose([member.standing(first) for member in alive]) if len(alive) > 1 else 0
        member = home.member = alive[place]
        member.homes[first.request.id] = home
        if member.actor is not None:
            member.actor.inbox.put(Admit(home.sequences))

    def _note_and_emit(self, deltas: list[Delta]) -> None:
        homes = self._homes
        for delta in deltas:
            home = homes.get(delta.request_id)
            if home is not None:
                home.begun = True
        self._emit(deltas)


def _afresh(sequence: Sequence) -> Sequence:
    """The same work from the start, for another schedule."""
    return Sequence(
        sequence.request,
        sequence.index,
        sequence.ids[: sequence.num_prompt],
        max_tokens=sequence.max_tokens,
        stop_ids=sequence.stop_ids,
        seed=sequence.seed,
        namespace=sequence.namespace,
    )


async def _watch_steps(actor: SchedulerActor, timeout_s: float) -> None:
    """Raise `EngineFailure` when a step has not come back for too long: callers must not wait for ever."""
    while timeout_s > 0:
        await anyio.sleep(min(WATCHDOG_PERIOD_S, timeout_s / 2))
        since = actor.busy_since
        if since is not None and time.monotonic() - since > timeout_s:
            logger.critical("no step came back for %.0f s (--watchdog-timeout)", timeout_s)
            raise EngineFailure("The engine hangs: a step did not come back.")
    await anyio.sleep_forever()
