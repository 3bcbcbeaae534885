"""One rank's part of a step. A model on one device has one rank; the ranks of a mesh act in step."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from runtime.batch import Batch
from runtime.cache.pool import KVPool
from runtime.execute.inputs import Staging, StepInputs, prepare
from runtime.execute.logprobs import CHUNK, prompt_places
from runtime.models.decoder import Decoder


class Broadcast(Protocol):
    """The ranks that share every layer."""

    @property
    def size(self) -> int: ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x`, in place."""
        ...


class Rank:
    """A share of the model over a share of the cache, and each slot's last token.

    The first rank of a team calls `hidden`, `logits` where it wants some, and `keep`; the others call
    `follow`, which does the same without choosing tokens. Only the first rank chooses: no two can disagree.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        *,
        num_slots: int,
        device: torch.device,
        team: Broadcast | None = None,
    ) -> None:
        self.device = device
        self.pool = pool
        self._model = model
        self._team = team if team is not None and team.size > 1 else None
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._staging = Staging(device)

    def hidden(self, batch: Batch) -> tuple[StepInputs, Tensor]:
        """The step's inputs, and the hidden states [T, E] of its tokens, whose KV is stored."""
        inputs = prepare(batch, self.pool.page_size, self._staging)
        token_ids = self._resolve(inputs)
        return inputs, self._model(token_ids, inputs.positions, inputs.attention, self.pool)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] -> float32 [n, V]; on ranks that follow, their part of it."""
        return self._model.logits(hidden)

    def keep(self, inputs: StepInputs, ids: Tensor) -> None:
        """Remember the sampled ids [R] as their slots' last tokens, on every rank."""
        if self._team is not None:
            ids = self._team.broadcast(ids)
        self._last_tokens[inputs.sample_slots] = ids

    def follow(self, batch: Batch) -> None:
        """Take part in a step that another rank leads."""
        inputs, hidden = self.hidden(batch)
        if batch.sampling is not None:
            self.logits(hidden[inputs.last_index])
            self.keep(inputs, torch.empty_like(inputs.sample_slots))
        if batch.prompt_logprobs:
            places = torch.from_numpy(prompt_places(batch.prompt_logprobs)).to(self.device)
            for part in places.split(CHUNK):
                self.logits(hidden[part])

    def _resolve(self, inputs: StepInputs) -> Tensor:
        """Token ids with the places filled in: what each slot sampled last."""
        known = inputs.token_ids
        return torch.where(known < 0, self._last_tokens[inputs.token_slots], known)
