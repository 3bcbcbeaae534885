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
from runtime.worker.cpu_graph import CpuGraph, chooses_greedily
from runtime.worker.device import Device
from runtime.worker.device_stream import Collect
from runtime.worker.forward_batch import StepInputs
from runtime.worker.logprobs import ScoredPrompts
from runtime.worker.rank import Rank
from runtime.worker.sampler import Sampled, Sampler


class Launcher:
    """The first rank's steps. Belongs to the thread that enqueues; what a launch returns may wait elsewhere.

    Every launch raises `OutOfMemory` where the device has too little for the step; the next one may succeed.
    """

    def __init__(self, rank: Rank, sampler: Sampler, device: Device, tape: CpuGraph | None = None) -> None:
        self._rank = rank
        self._sampler = sampler
        self._device = device
        self._tape = tape
        self._begun: deque[_Begun] = deque()  # steps whose end is not reached

    def run(self, batch: Batch) -> Collect[Tokens]:
        """Enqueue a whole step."""
        with self._enqueueing():
            if self._tape is not None and self._tape.takes(batch):
                return self._run_tape(self._tape, batch)
            inputs, hidden = self._rank.begin(batch)
            return self._finish(_Begun(batch, inputs, hidden))

    def close(self) -> None:
        """Nothing is launched any more: end what a step is computed with."""
        if self._tape is not None:
            self._tape.close()

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

    def _run_tape(self, tape: CpuGraph, batch: Batch) -> Collect[Tokens]:
        """Compute a step by one native call, and choose its tokens in the same one where that is simple."""
        last_tokens, sampling, sampled = self._rank.last_tokens, batch.sampling, None
        if sampling is None:
            tape.run(batch, last_tokens)
        elif tape.chooses and chooses_greedily(sampling):
            sampled = Sampled(*tape.choose(batch, last_tokens))
        else:
            sampled = self._sampler.sample(tape.logits(batch, last_tokens), batch)
            last_tokens[torch.from_numpy(batch.slots[sampling.rows])] = sampled.ids
        return _Pending(batch, sampled, None).copy_out(self._device)

    def _finish(self, begun: _Begun) -> Collect[Tokens]:
        """Choose tokens, score what is to be scored, and bring it to the host."""
        batch, inputs = begun.batch, begun.inputs
        rank = self._rank
        hidden = rank.hidden(*begun)
        sampled = prompts = None
        if batch.sampling is not None:
            sampled = self._sampler.sample(rank.logits(hidden[inputs.last_index]), batch)
            rank.keep(inputs, sampled.ids)
        if batch.prompt_logprobs:
            prompts = self._sampler.score_prompts(hidden, rank.logits, batch.prompt_logprobs)
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
            for row, new in zip(rows, tokens.tokens, strict=True):
                ids[row] = new[0] if new else UNKNOWN
            broken = [rows[place] for place in tokens.failed]
            if tokens.logprobs is not None:
                by_row = dict(zip(rows, tokens.logprobs, strict=True))
                logprobs = [by_row.get(row) for row in range(num_rows)]
        prompts = self.prompts.read(next(copies)) if self.prompts is not None else []
        return Tokens(ids, broken, logprobs, prompts)
