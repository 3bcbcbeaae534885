"""How a step's hidden states are computed: the one place where a whole model is called."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.models.decoder import Decoder, LayerPools
from runtime.worker.forward_batch import StepInputs


class Forward(Protocol):
    """Runs a model that lies whole on one rank, or one rank's share of every layer of it."""

    def __call__(self, token_ids: Tensor, inputs: StepInputs) -> Tensor:
        """token_ids int64 [T], all known -> hidden [T, E], the final norm applied. Writes the KV of all T.

        `inputs.token_ids` may still hold places instead of ids; `token_ids` counts. What is returned is the
        caller's until the next call.
        """
        ...


class EagerForward:
    """Calls the model, operation by operation: right for every batch."""

    def __init__(self, model: Decoder, pool: LayerPools) -> None:
        self._model = model
        self._pool = pool

    def __call__(self, token_ids: Tensor, inputs: StepInputs) -> Tensor:
        return self._model(token_ids, inputs.positions, inputs.attention, self._pool)
