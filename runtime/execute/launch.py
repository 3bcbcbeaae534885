"""One step on the device: enqueued by one call, read on the host by another."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.batch import UNKNOWN, Batch, Tokens
from runtime.errors import OutOfMemory
from runtime.execute.device import Device
from runtime.execute.inputs import StepInputs
from runtime.execute.logprobs import ScoredPrompts, score_prompts
from runtime.execute.rank import Rank
from runtime.execute.sampler import Sampled, Sampler
from runtime.execute.stream import Collect


class Launcher:
    """The first rank's steps. Belongs to the thread that enqueues; what a launch returns may wait elsewhere.

    Every launch raises `OutOfMemory` where the device has too little for the step; the next one may succeed.
    """

    def __init__(self, rank: Rank, sampler: Sampler, device: Device) -> None:
        self._rank = rank
        self._sampler = sampler
        self._device = device
        self._begun: deque[_Begun] = deque()  # steps whose end is not reached

    def run(self, batch: Batch) -> Collect[Tokens]:
        """Enqueue a whole step."""
        with self._enqueueing():
            inputs, hidden = self._rank.begin(batch)
            return self._finish(_Begun(batch, inputs, hidden))

    def begin(self, batch: Batch) -> Collect[None]:
        """Enqueue the first stage's layers of a step."""
        with self._enqueueing():
            inputs, hidden = self._rank.begin(batch)
        self._begun.append(_Begun(batch, inputs, hidden))
        return lambda: None

    def end(self) -> Collect[Tokens]:
        """Enqueue the end of the oldest step that only began."""
        with self._enqueueing():
            return self._finish(self._begun.popleft())

    @contextmanager
    def _enqueueing(self) -> Iterator[None]:
        try:
            with torch.inference_mode(), self._device.forward():
                yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had computed so far
            self._device.release_unused()
            raise OutOfMemory("The device ran out of memory in a step.") from error

    def _finish(self, begun: _Begun) -> Collect[Tokens]:
        """Choose tokens, score what is to be scored, and bring it to the host."""
        batch, inputs = begun.batch, begun.inputs
        rank = self._rank
        hidden = rank.hidden(*begun)
        sampled = prompts = None
        if batch.sampling is not None:
            sampled = self._sampler.sample(rank.logits(hidden[inputs.last_index]), batch.sampling)
            rank.keep(inputs, sampled.ids)
        if batch.prompt_logprobs:
            prompts = score_prompts(hidden, rank.logits, batch.prompt_logprobs)
        return _Pending(batch, sampled, prompts).copy_out(self._device)


class _Begun(NamedTuple):
    """A step whose tokens are still to be chosen."""

    batch: Batch
    inputs: StepInputs
    hidden: Tensor | None  # None: other stages compute it


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step whose result is still on the device."""

    batch: Batch
    sampled: Sampled | None
    prompts: ScoredPrompts | None

    def copy_out(self, device: Device) -> Collect[Tokens]:
        """Start copying to the host behind the forward; what is returned waits for that."""
        parts = [part.tensors() for part in (self.sampled, self.prompts) if part is not None]
        host, copied = device.download([tensor for part in parts for tensor in part])

        def collect() -> Tokens:
            copied.wait()
            copies = iter(host)
            return self._read([[next(copies) for _ in part] for part in parts])

        return collect

    def _read(self, host: Sequence[Sequence[Tensor]]) -> Tokens:
        num_rows = len(self.batch.sequences)
        ids, broken = [UNKNOWN] * num_rows, []
        logprobs = None
        copies = iter(host)
        if self.sampled is not None and self.batch.sampling is not None:
            rows = self.batch.sampling.rows.tolist()
            tokens = self.sampled.read(next(copies))
            if len(rows) == num_rows:
                ids = tokens.ids
            else:
                for row, token_id in zip(rows, tokens.ids, strict=True):
                    ids[row] = token_id
            broken = [rows[place] for place in tokens.broken]
            if tokens.logprobs is not None:
                by_row = dict(zip(rows, tokens.logprobs, strict=True))
                logprobs = [by_row.get(row) for row in range(num_rows)]
        prompts = self.prompts.read(next(copies)) if self.prompts is not None else []
        return Tokens(ids, broken, logprobs, prompts)
