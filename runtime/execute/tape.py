"""A step as one native call: the model's kernels in C++, recorded once and run from a tape.

The counterpart on a CPU of what a CUDA graph is on a GPU. A step of a small model is hundreds of operations, each of
which costs Python and torch microseconds and asks for Python's lock, for which the loop competes. Run from a tape they
cost one call, without the lock, for any batch of up to `capacity` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention import AttentionInputs
from ops.cpp.executor import Executor, NotRecordable, Tape, step_of
from ops.cpp.library import Embed, address
from runtime.cache.pool import KVPool
from runtime.execute.forward import EagerForward
from runtime.execute.inputs import StepInputs
from runtime.models.decoder import Decoder


class TapeForward:
    """Computes steps from a tape, and those too large for it eagerly (see `runtime.execute.forward.Forward`).

    Raises `NotRecordable` for a model of which torch computes a part.
    """

    def __init__(self, model: Decoder, pool: KVPool, executor: Executor, capacity: int) -> None:
        self._eager = EagerForward(model, pool)
        with torch.inference_mode():
            self._tape = record(model, pool, executor, capacity)

    def __call__(self, token_ids: Tensor, inputs: StepInputs) -> Tensor:
        if len(token_ids) > self._tape.capacity:
            return self._eager(token_ids, inputs)
        return self._tape.run(step_of(inputs.attention, token_ids, inputs.positions))


def record(model: Decoder, pool: KVPool, executor: Executor, capacity: int) -> Tape:
    """The tape of a model over this pool. Nothing is computed."""
    embedding = model.embedding
    if embedding is None or model.dtype not in executor.dtypes:
        raise NotRecordable(f"the kernels in C++ compute nothing in {model.dtype}")
    weight = embedding.weight
    nothing = torch.empty(0, dtype=torch.int32)
    positions = torch.empty(capacity, dtype=torch.int64)
    inputs = AttentionInputs(
        page_table=nothing.view(0, 0),
        starts=nothing,
        counts=nothing,
        query_starts=nothing,
        slots=positions,
        page_size=pool.page_size,
        starts_host=(),
        counts_host=(),
    )

    def forward() -> Tensor:
        x = executor.empty((capacity, model.hidden_size), model.dtype)
        executor.launch("embed", model.dtype, Embed(address(weight), address(x), model.hidden_size))
        return model.finish(*model.blocks(x, positions, inputs, pool))

    return executor.record(capacity, forward)
