"""Replaces the weights of all replicas while requests run. Either all ranks get the new weights, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from runtime.actors.scheduler import SchedulerActor
from runtime.errors import CheckpointError, EngineClosed, EngineFailure, InvalidRequest, WorkerFailed

logger = logging.getLogger("penstock.core")

LOST = "The weights could not be replaced, and the old ones could not be read again."


async def replace_weights(
    actors: Sequence[SchedulerActor], path: str, load_format: str | None, *, recompute: bool
) -> None:
    """Load the weights of a checkpoint on all ranks, between two steps. This call must not be cancelled.

    With `recompute`, the prefix trees are emptied and running sequences are recomputed; otherwise the KV of the old
    weights stays in use. After a failure, raises `InvalidRequest` or `CheckpointError` if the old weights are
    in use again. Raises `EngineFailure` if a replica has no valid weights; this replica then ends.
    """
    payload = {"path": path, "load_format": load_format}
    await asyncio.gather(*(actor.runner.call("check_weights", payload) for actor in actors))
    async with AsyncExitStack() as stack:  # no replica continues before all have the new weights
        pauses = [await stack.enter_async_context(actor.paused()) for actor in actors]
        error = first_error(await ask(actors, "load_weights", payload))
        if error is None:
            await ask(actors, "accept_weights", {})
            for pause in pauses:
                pause.weights_changed, pause.checkpoint, pause.recompute = True, path, recompute
            return
        lost = False
        for pause, restored in zip(pauses, await ask(actors, "restore_weights", {}), strict=True):
            if isinstance(restored, Exception):
                lost = True
                logger.error("%s", LOST, exc_info=restored)
                pause.failure = EngineFailure(LOST)
    if lost:
        raise EngineFailure(LOST)
    raise CheckpointError(f"{error} The old weights are in place again.")


async def ask(
    actors: Sequence[SchedulerActor],
    verb: str,
    payload: Mapping[str, Any],
    of_replica: Callable[[int], Mapping[str, Any]] = lambda index: {},
) -> list[Any]:
    """Run a command (see `runtime.worker.verbs`) on every rank of each replica.

    Return, for each replica, the list of its ranks' answers, or the exception of the call. `of_replica(index)` returns
    additional payload values for a replica.
    """
    calls = [actor.runner.call(verb, {**payload, **of_replica(actor.index)}) for actor in actors]
    found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    return found


def first_error(replicas: Sequence[Any]) -> str | None:
    """Return the reason why a rank could not load its weights, or None if all ranks loaded them."""
    for answers in replicas:
        if isinstance(answers, WorkerFailed | EngineClosed | InvalidRequest):
            return answers.message
        if isinstance(answers, CheckpointError):
            return str(answers)
        if isinstance(answers, BaseException):
            logger.error("The weights were not loaded.", exc_info=answers)
            return "The weights cannot be loaded."
        for answer in answers:
            if answer["error"] is not None:
                return answer["error"]
    return None
