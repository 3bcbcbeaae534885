"""Profiles steps with torch's profiler. Writes a Chrome trace of operations, CPU graph kernels and GPU kernels."""

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
    """Profiles steps from `start` until `stop`, or for the requested number of steps.

    All methods must be called on the thread that enqueues steps, because torch records the operations of this thread.
    The trace is written on another thread, so that steps continue.
    """

    def __init__(self, options: ProfileOptions, *, on_cuda: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU] if options.cpu else []
        if options.gpu and on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.written: Future[Path] = Future()  # path of the trace, or the error of writing it
        self.num_steps = 0
        self._options = options
        self._profile = torch.profiler.profile(
            activities=activities or [torch.profiler.ProfilerActivity.CPU],
            record_shapes=options.record_shapes,
            profile_memory=options.memory,
            with_stack=options.with_stack,
        )

    def start(self) -> None:
        """Start the profile."""
        self._profile.start()

    @property
    def running(self) -> bool:
        """Whether the profile records further steps."""
        return self.num_steps < self._options.num_steps

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Profile the step that the `with` block runs. Its name in the trace has the number of rows and tokens."""
        name = f"step {batch.number}: {len(batch.starts)} rows, {len(batch.token_ids)} tokens"
        with torch.profiler.record_function(name):
            yield
        self.num_steps += 1
        if not self.running:
            self.stop()

    def stop(self) -> None:
        """End the profile, and start to write the trace on a thread."""
        self._profile.stop()
        threading.Thread(target=self._write, name="penstock-profile", daemon=True).start()

    def _write(self) -> None:
        path = self._options.path
        try:
            self._profile.export_chrome_trace(str(path))
        except Exception as error:  # for example a full disk; `stop_profile` reports it
            self.written.set_exception(error)
        else:
            logger.info("A profile of %d steps was written to %s.", self.num_steps, path)
            self.written.set_result(path)
