"""A profile of steps as a Chrome trace, by torch's profiler: operations, kernels of the CPU graph, a GPU's kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch.profiler

from runtime.batch import Batch
from runtime.profile import ProfileOptions

logger = logging.getLogger("penstock.worker")


class StepProfiler:
    """Runs from `start` until `stop`, or until its number of steps is reached.

    All methods belong to the thread that enqueues steps: torch notes the operations of that thread. The trace is
    written by another one, so that steps go on.
    """

    def __init__(self, options: ProfileOptions, *, on_cuda: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU] if options.cpu else []
        if options.gpu and on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.written: Future[Path] = Future()  # the trace's path, or why it could not be written
        self.num_steps = 0
        self._options = options
        self._profile = torch.profiler.profile(
            activities=activities or [torch.profiler.ProfilerActivity.CPU],
            record_shapes=options.record_shapes,
            profile_memory=options.memory,
            with_stack=options.with_stack,
        )

    def start(self) -> None:
        """Begin with the next operation."""
        self._profile.start()

    @property
    def running(self) -> bool:
        """Whether further steps are wanted."""
        return self.num_steps < self._options.num_steps

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """One step, named in the trace by its rows and tokens."""
        name = f"step {batch.number}: {len(batch.starts)} rows, {len(batch.token_ids)} tokens"
        with torch.profiler.record_function(name):
            yield
        self.num_steps += 1
        if not self.running:
            self.stop()

    def stop(self) -> None:
        """End, and have the trace written."""
        self._profile.stop()
        threading.Thread(target=self._write, name="penstock-profile", daemon=True).start()

    def _write(self) -> None:
        path = self._options.path
        try:
            self._profile.export_chrome_trace(str(path))
        except Exception as error:  # a disk that is full, perhaps; whoever asks for the profile is told
            self.written.set_exception(error)
        else:
            logger.info("a profile of %d steps is in %s", self.num_steps, path)
            self.written.set_result(path)
