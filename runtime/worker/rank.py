"""One rank's part of a step. A model on one device has one rank; the ranks of a mesh act in step."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.batch import Batch
from runtime.distributed.mesh import Mesh
from runtime.kv_cache.pools import KVPool
from runtime.models.decoder import Decoder
from runtime.worker.device import Device
from runtime.worker.forward_batch import Forward, Staging, StepInputs, prepare
from runtime.worker.logprobs import CHUNK, prompt_indices


class Rank:
    """A share of the model over a share of the cache, and each slot's last token.

    The first rank leads: it calls `begin`, then `hidden`, `logits` where it wants some, and `keep`. The other
    ranks of its stage call `begin` and `follow`, which ends a step without choosing tokens, and those of
    later stages `relay`. Only the first rank chooses: no two can disagree.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        forward: Forward,
        *,
        num_slots: int,
        device: Device,
        mesh: Mesh | None = None,
    ) -> None:
        self.device = device.torch_device
        self.pool = pool
        self._model = model
        self._forward = forward  # unless the model lies in stages
        self._mesh = mesh if mesh is not None and mesh.place.world_size > 1 else None
        self._pipelined = mesh is not None and mesh.place.pp_size > 1
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self.device)  # by slot
        self._staging = Staging(device)

    def begin(self, batch: Batch) -> tuple[StepInputs, Tensor | None]:
        """The step's inputs, and the hidden states [T, E] of its tokens, unless later stages compute them."""
        inputs = prepare(batch, self.pool, self._staging, self.last_tokens)
        forward = inputs.forward
        if self._mesh is None or not self._pipelined:
            return inputs, self._forward(forward)
        x, residual = self._model.blocks(self._model.embed(forward), None, forward)
        self._mesh.pass_on(x if residual is None else x + residual)
        return inputs, None

    def hidden(self, batch: Batch, inputs: StepInputs, hidden: Tensor | None) -> Tensor:
        """hidden [T, E] as `begin` gave it, or as it comes back: of the tokens whose logits are wanted."""
        if hidden is not None:
            return hidden
        places = self._wanted(batch, inputs)
        hidden = self._blank(inputs)
        if self._mesh is not None and len(places):
            hidden[places] = self._mesh.take(hidden.new_empty(len(places), hidden.shape[1]))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] -> float32 [n, V]; on ranks that follow, their part of it."""
        return self._model.logits(hidden)

    def keep(self, inputs: StepInputs, ids: Tensor) -> None:
        """Remember the sampled ids [R] as their slots' last tokens, on every rank that embeds tokens.

        Not in a pipeline, whose batches hold no sequence that is in flight: all their tokens are known.
        """
        if self._pipelined:
            return
        if self._mesh is not None:
            ids = self._mesh.broadcast(ids)
        self.last_tokens[inputs.sample_slots] = ids

    def follow(self, batch: Batch, inputs: StepInputs, hidden: Tensor | None) -> None:
        """Take part in the end of a step whose beginning was `begin`, led by the first rank."""
        hidden = self.hidden(batch, inputs, hidden)
        if batch.sampling is not None:
            self.logits(hidden[inputs.last_index])
            self.keep(inputs, torch.empty_like(inputs.sample_slots))
        if batch.prompt_logprobs:
            places = torch.from_numpy(prompt_indices(batch.prompt_logprobs)).to(self.device)
            for part in places.split(CHUNK):
                self.logits(hidden[part])

    def relay(self, batch: Batch) -> None:
        """A later stage's step: through its layers, and on, or back what the first stage wants."""
        mesh = self._mesh
        if mesh is None:
            raise RuntimeError("There is no stage before this one.")
        inputs = prepare(batch, self.pool, self._staging, self.last_tokens)
        x, residual = self._model.blocks(mesh.take(self._blank(inputs)), None, inputs.forward)
        if not mesh.place.last:
            mesh.pass_on(x if residual is None else x + residual)
            return
        places = self._wanted(batch, inputs)
        if len(places):
            mesh.pass_on(self._model.finish(x, residual)[places])

    def _blank(self, inputs: StepInputs) -> Tensor:
        shape = (inputs.forward.num_tokens, self._model.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self.device)

    def _wanted(self, batch: Batch, inputs: StepInputs) -> Tensor:
        """Positions of the flat batch whose logits are wanted, int64."""
        if not batch.prompt_logprobs:
            return inputs.last_index
        prompts = torch.from_numpy(prompt_indices(batch.prompt_logprobs)).to(self.device)
        return torch.cat([inputs.last_index, prompts])
