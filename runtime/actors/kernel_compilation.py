"""Compiles the C++ kernels while torch computes the first steps, then lets them compute all further steps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from ops.cpp.build import BuildError, Lifeline
from runtime.errors import EngineClosed

if TYPE_CHECKING:
    from runtime.worker.model_runner import ModelRunner, StepExecutor

logger = logging.getLogger("penstock.core")

BEGINS = "Steps are computed by PyTorch until the C++ kernels are compiled. Requests are accepted meanwhile."
ENDS = "C++ kernels compute all further steps. Running requests were recomputed, and the prefix cache was emptied."
FAILED = "The kernels in C++ cannot be used; slower kernels of torch are used instead: %s"
CHANGED = "The weights have changed since the start, so PyTorch computes the steps until the next start."


class Recomputing(Protocol):
    """A pause of the steps."""

    recompute: bool  # whether, at its end, the prefix tree is emptied and all sequences are recomputed


@dataclass(slots=True)
class KernelCompilation:
    """Replaces torch's kernels by C++ kernels in a running engine of one rank."""

    runner: ModelRunner
    # Compiles the kernels and loads the model for them. Takes seconds. Returns the executor and its description.
    make: Callable[[Lifeline], tuple[StepExecutor, str]]

    async def run(self, paused: Callable[[], AbstractAsyncContextManager[Recomputing]], lock: anyio.Lock) -> None:
        """Compile the kernels, then use them. After an error, torch computes all further steps, and a warning says so.

        `paused` pauses the steps of the replica (see `SchedulerActor.paused`), and `lock` excludes changes of the
        weights. Running requests continue and are recomputed once. Cancellation kills the compilers.
        """
        logger.info(BEGINS)
        try:
            with Lifeline(in_background=True) as lifeline:
                async with cut_if_cancelled(lifeline):
                    executor, description = await anyio.to_thread.run_sync(self.make, lifeline)
            async with lock, paused() as pause:
                pause.recompute = used = await self.runner.replace_executor(executor, description)
        except BuildError as error:
            logger.warning(FAILED, error)
        except EngineClosed:
            return
        except Exception as error:  # too little memory, or a checkpoint that was deleted: the engine goes on
            logger.exception(FAILED, error)
        else:
            logger.info(ENDS if used else CHANGED)
            if used:
                logger.info("Kernels: %s", description)


@asynccontextmanager
async def cut_if_cancelled(lifeline: Lifeline) -> AsyncIterator[None]:
    """Cut the lifeline as soon as the block is cancelled, even if the block waits for a thread."""

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            lifeline.cut()

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        yield
        watching.cancel_scope.cancel()
