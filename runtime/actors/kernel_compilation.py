"""Compile the C++ kernels while PyTorch computes the first steps, then switch the engine to the C++ kernels."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from ops.cpp.build import BuildError, BuildStopped, Lifeline
from runtime.errors import EngineClosed, first_error

if TYPE_CHECKING:
    from runtime.worker.model_runner import ModelRunner, StepExecutor

logger = logging.getLogger("penstock.core")

BEGINS = "Steps are computed by PyTorch until the C++ kernels are compiled. Requests are accepted meanwhile."
ENDS = "C++ kernels compute all further steps. Running requests were recomputed, and the prefix cache was emptied."
FAILED = "The kernels in C++ cannot be used; slower kernels of torch are used instead: %s"
DEPENDENCE = "PyTorch computes the steps until the C++ kernels are compiled, and its products depend on the batch"
NOT_COMPILED = "the C++ kernels cannot be compiled (see the log), and PyTorch's products depend on the batch"
CHANGED = "The weights have changed since the start, so PyTorch computes the steps until the next start."


class Recomputing(Protocol):
    """A pause between two steps."""

    recompute: bool  # whether all sequences are recomputed, and the prefix tree is emptied, when the pause ends


@dataclass(slots=True)
class KernelCompilation:
    """Replaces PyTorch's kernels with C++ kernels in a running engine with one rank."""

    runner: ModelRunner
    # Compiles the C++ kernels (seconds) and loads the model for them. Returns the executor and a description of it.
    make: Callable[[Lifeline], tuple[StepExecutor, str]]

    async def run(self, paused: Callable[[], AbstractAsyncContextManager[Recomputing]], lock: anyio.Lock) -> bool:
        """Compile the kernels and switch to them. Return whether the C++ kernels now compute the steps.

        `paused` pauses the steps of the replica (see `SchedulerActor.paused`), and `lock` prevents weight updates
        during the switch. Running requests are recomputed and continue. After an error, the error is logged and
        PyTorch's kernels stay in use. Cancellation kills the compilers.
        """
        logger.info(BEGINS)
        try:
            with Lifeline(in_background=True) as lifeline:
                async with cut_if_cancelled(lifeline):
                    executor, description = await anyio.to_thread.run_sync(self.make, lifeline)
            async with lock, paused() as pause:
                pause.recompute = used = await self.runner.replace_executor(executor, description)
        except Exception as raised:  # an exception group from `cut_if_cancelled`, or an error of the switch
            error = first_error(raised)
            if isinstance(error, BuildError):
                logger.warning(FAILED, error)
            elif not isinstance(error, BuildStopped | EngineClosed):  # both mean that the engine is closing
                # For example, too little memory or a deleted checkpoint. The engine continues with PyTorch's kernels.
                logger.error(FAILED, error, exc_info=error)
            return False
        logger.info(ENDS if used else CHANGED)
        if used:
            logger.info("Kernels: %s", description)
        return used


@asynccontextmanager
async def cut_if_cancelled(lifeline: Lifeline) -> AsyncIterator[None]:
    """Cut the lifeline as soon as the block is cancelled, even while the block waits for a thread.

    Cutting it ends the compilers that hold the lifeline.
    """

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            lifeline.cut()

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        yield
        watching.cancel_scope.cancel()
