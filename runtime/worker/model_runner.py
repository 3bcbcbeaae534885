"""Runs batches on one device, in order, beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import torch

from runtime.batch import Batch, Tokens
from runtime.distributed.mesh import Mesh
from runtime.kv_cache.pools import KVPool
from runtime.models.decoder import Decoder
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.device import Device, open_device
from runtime.worker.device_stream import DeviceStream, Ticket
from runtime.worker.forward_batch import Forward
from runtime.worker.graph_capture import Chores
from runtime.worker.launch import Launcher
from runtime.worker.rank import Rank
from runtime.worker.sampler import Sampler
from runtime.worker.step_timer import Occupancy


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
    rank, and the others must do their part of every batch in the same order. `forward` computes the hidden
    states, eagerly unless it is given; `improve` does one piece of work that makes later steps faster, between
    steps, and tells whether there is more; a `tape` computes whole steps in one call. Belongs to the loop it was
    made on.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        sampler: Sampler,
        *,
        num_slots: int,
        device: str | Device,
        mesh: Mesh | None = None,
        forward: Forward | None = None,
        improve: Callable[[], bool] | None = None,
        tape: CpuGraph | None = None,
    ) -> None:
        if isinstance(device, str):
            device = open_device(torch.device(device))
        self.device, self._device = device.torch_device, device
        self._rank = Rank(model, pool, forward or model, num_slots=num_slots, device=device, mesh=mesh)
        self._launcher = Launcher(self._rank, sampler, device, tape)
        self._stream = DeviceStream(asyncio.get_running_loop(), separate_collect=not device.is_host)
        self._pipelined = mesh is not None and mesh.place.pp_size > 1
        self._chores = Chores(self._stream, improve) if improve is not None else None

    def launch(self, batch: Batch) -> ModelStep | PipelinedStep:
        """Enqueue the batch; returns at once."""
        launcher = self._launcher
        if self._pipelined:
            return PipelinedStep(
                self._stream.submit(lambda: launcher.begin(batch)), lambda: self._stream.submit(launcher.end)
            )
        ticket = self._stream.submit(lambda: launcher.run(batch))
        if self._chores is not None:
            self._chores.note_step(ticket)
        return ModelStep(ticket)

    def close(self) -> None:
        """Finish what was launched and let go of the weights and the cache. Blocks."""
        if self._chores is not None:
            self._chores.close()
        self._stream.close()
        self._launcher.close()
        del self._rank, self._launcher

    @property
    def improving(self) -> bool:
        """Whether later steps will be faster than those until now, because there is work left for that."""
        return self._chores is not None and self._chores.left

    def measure(self) -> Occupancy:
        """Time every further step; a second call starts anew."""
        device = self._device
        occupancy = Occupancy(None if device.is_host else device.forward)
        self._stream.around = occupancy.around
        return occupancy

    async def watch(self) -> None:
        """Never returns: a runner without other processes fails step by step only."""
        await anyio.sleep_forever()
