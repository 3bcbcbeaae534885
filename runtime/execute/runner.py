"""Runs batches on one device, in order, beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import UNKNOWN, Batch, Tokens
from runtime.cache.pool import KVPool
from runtime.execute.inputs import Staging, StepInputs, prepare
from runtime.execute.logprobs import ScoredPrompts, score_prompts
from runtime.execute.sampler import Sampled, Sampler
from runtime.execute.stream import Collect, DeviceStream, Ticket
from runtime.models.decoder import Decoder


class ModelStep:
    """A launched batch; `tokens` waits for its result."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket[Tokens]) -> None:
        self._ticket = ticket

    async def tokens(self) -> Tokens:
        """The step's tokens, on the host. Raises what the forward raised."""
        return await self._ticket.result()


class ModelRunner:
    """A model, its KV pool, its sampler and the stream they run on.

    `launch` may be called while earlier steps run: each sequence's last sampled token stays on the device, in
    its slot, so that a batch can name a token that nobody has seen yet. Belongs to the loop it was made on.
    """

    def __init__(
        self, model: Decoder, pool: KVPool, sampler: Sampler, *, num_slots: int, device: str
    ) -> None:
        self.device = torch.device(device)
        self.pool = pool
        self._model = model
        self._sampler = sampler
        self._cuda = self.device.type == "cuda"
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self._staging = Staging(self.device)
        self._forward_stream = torch.cuda.Stream(self.device) if self._cuda else None
        if self._cuda:
            torch.cuda.synchronize(self.device)  # weights and pool were written on another stream
        self._stream = DeviceStream(asyncio.get_running_loop(), separate_collect=self._cuda)

    def launch(self, batch: Batch) -> ModelStep:
        """Enqueue the batch; returns at once."""
        return ModelStep(self._stream.submit(lambda: self._run(batch)))

    def close(self) -> None:
        """Finish what was launched and let go of the weights and the cache. Blocks."""
        self._stream.close()
        del self._model, self.pool, self._sampler, self._last_tokens

    def _run(self, batch: Batch) -> Collect[Tokens]:
        with torch.inference_mode(), torch.cuda.stream(self._forward_stream):
            sampled, prompts = self._forward(batch)
            pending = _Pending(batch, sampled, prompts)
            return pending.copy_out() if self._cuda else pending.collect

    def _forward(self, batch: Batch) -> tuple[Sampled | None, ScoredPrompts | None]:
        inputs = prepare(batch, self.pool.page_size, self._staging)
        token_ids = self._resolve(inputs)
        hidden = self._model(token_ids, inputs.positions, inputs.attention, self.pool)
        sampled = prompts = None
        if batch.sampling is not None:
            logits = self._model.logits(hidden[inputs.last_index])
            sampled = self._sampler.sample(logits, batch.sampling)
            self._last_tokens[inputs.sample_slots] = sampled.ids
        if batch.prompt_logprobs:
            prompts = score_prompts(hidden, self._model.logits, batch.prompt_logprobs)
        return sampled, prompts

    def _resolve(self, inputs: StepInputs) -> torch.Tensor:
        """Token ids with the places filled in: what each slot sampled last."""
        known = inputs.token_ids
        return torch.where(known < 0, self._last_tokens[inputs.token_slots], known)


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
