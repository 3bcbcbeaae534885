"""Runs batches on one device, in order, beside the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio
import torch

from runtime.batch import UNKNOWN, Batch, Tokens
from runtime.cache.pool import KVPool
from runtime.execute.inputs import StepInputs
from runtime.execute.logprobs import ScoredPrompts, score_prompts
from runtime.execute.occupancy import Occupancy
from runtime.execute.rank import Rank
from runtime.execute.sampler import Sampled, Sampler
from runtime.execute.stream import Collect, DeviceStream, Ticket
from runtime.models.decoder import Decoder
from runtime.parallel.mesh import Mesh


class ModelStep:
    """A launched batch; `tokens` waits for its result."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket[Tokens]) -> None:
        self._ticket = ticket

    async def tokens(self) -> Tokens:
        """The step's tokens, on the host. Raises what the forward raised."""
        return await self._ticket.result()


class PipelinedStep:
    """A launched batch of which the first stage's layers are computed, or soon will be.

    Its end, on the same thread, waits for the other stages. So it is enqueued only when somebody asks for the
    tokens: until then the beginnings of further batches may go before it, and the stages overlap.
    """

    __slots__ = ("_begun", "_end")

    def __init__(self, begun: Ticket[None], end: Callable[[], Ticket[Tokens]]) -> None:
        self._begun = begun
        self._end = end

    async def tokens(self) -> Tokens:
        """The step's tokens, on the host. Raises what the forward raised. Ask once, in order of launch."""
        ended = self._end()
        await self._begun.result()
        return await ended.result()


class ModelRunner:
    """A model, its KV pool, its sampler and the stream they run on.

    `launch` may be called while earlier steps run: each sequence's last sampled token stays on the device, in
    its slot, so that a batch can name a token that nobody has seen yet. With a `mesh`, this is its first
    rank, and the others must do their part of every batch in the same order. Belongs to the loop it was made
    on.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        sampler: Sampler,
        *,
        num_slots: int,
        device: str,
        mesh: Mesh | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._rank = Rank(model, pool, num_slots=num_slots, device=self.device, mesh=mesh)
        self._sampler = sampler
        self._cuda = self.device.type == "cuda"
        self._forward_stream = torch.cuda.Stream(self.device) if self._cuda else None
        if self._cuda:
            torch.cuda.synchronize(self.device)  # weights and pool were written on another stream
        self._stream = DeviceStream(asyncio.get_running_loop(), separate_collect=self._cuda)
        self._pipelined = mesh is not None and mesh.place.pp_size > 1
        self._begun: deque[_Begun] = deque()  # the device thread's: steps whose end is not reached

    def launch(self, batch: Batch) -> ModelStep | PipelinedStep:
        """Enqueue the batch; returns at once."""
        if self._pipelined:
            return PipelinedStep(
                self._stream.submit(lambda: self._begin(batch)), lambda: self._stream.submit(self._end)
            )
        return ModelStep(self._stream.submit(lambda: self._run(batch)))

    def close(self) -> None:
        """Finish what was launched and let go of the weights and the cache. Blocks."""
        self._stream.close()
        del self._rank, self._sampler

    def measure(self) -> Occupancy:
        """Time every further step; a second call starts anew."""
        forward = partial(torch.cuda.stream, self._forward_stream) if self._cuda else None
        occupancy = Occupancy(forward)
        self._stream.around = occupancy.around
        return occupancy

    async def watch(self) -> None:
        """Never returns: a runner without other processes fails step by step only."""
        await anyio.sleep_forever()

    def _run(self, batch: Batch) -> Collect[Tokens]:
        with torch.inference_mode(), torch.cuda.stream(self._forward_stream):
            inputs, hidden = self._rank.begin(batch)
            return self._finish(_Begun(batch, inputs, hidden))

    def _begin(self, batch: Batch) -> Collect[None]:
        with torch.inference_mode(), torch.cuda.stream(self._forward_stream):
            inputs, hidden = self._rank.begin(batch)
        self._begun.append(_Begun(batch, inputs, hidden))
        return lambda: None

    def _end(self) -> Collect[Tokens]:
        with torch.inference_mode(), torch.cuda.stream(self._forward_stream):
            return self._finish(self._begun.popleft())

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
        pending = _Pending(batch, sampled, prompts)
        return pending.copy_out() if self._cuda else pending.collect


class _Begun(NamedTuple):
    """A step whose tokens are still to be chosen."""

    batch: Batch
    inputs: StepInputs
    hidden: torch.Tensor | None  # None: other stages compute it


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step whose result is still on the device."""

    batch: Batch
    sampled: Sampled | None
    prompts: ScoredPrompts | None

    def _parts(self) -> list[Sampled | ScoredPrompts]:
        return [part for part in (self.sampled, self.prompts) if part is not None]

    def copy_out(self) -> Collect[Tokens]:
        """Start copying to pinned memory behind the forward; what is returned waits for that."""
        host = [
            [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in part.tensors()]
            for part in self._parts()
        ]
        for part, copies in zip(self._parts(), host, strict=True):
            for tensor, copy in zip(part.tensors(), copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def collect() -> Tokens:
            done.synchronize()
            return self._read(host)

        return collect

    def collect(self) -> Tokens:
        """On a device whose tensors the host can read."""
        return self._read([part.tensors() for part in self._parts()])

    def _read(self, host: Sequence[Sequence[torch.Tensor]]) -> Tokens:
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
