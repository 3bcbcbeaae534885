"""Find the optional inputs of a batch that a model reads. Captured graphs allocate buffers for only these inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from runtime.layers.embedding import Embedding
from runtime.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class BatchReads:
    """The optional inputs that a model reads, in addition to token ids and one-axis positions."""

    row_values: tuple[str, ...] = ()  # names in `ForwardBatch.row_values` that layers read
    position_axes: bool = False  # whether positions have three axes
    media_size: int = 0  # size of the vectors that may replace token embeddings; 0: embeddings are never replaced
    state_size: int = 0  # size of the vectors in `ForwardBatch.states`; 0: no layer reads them
    state_dtype: torch.dtype = torch.float32  # dtype of these vectors


def batch_reads(model: nn.Module) -> BatchReads:
    """Return the optional inputs that the model's modules read.

    Layers declare these inputs in attributes: row values in `row_values`, replaced token embeddings in `takes_media`,
    and the hidden states that a draft head reads in `target_state_size`. A rotary embedding with sections reads
    positions on three axes.
    """
    if isinstance(reads := getattr(model, "reads", None), BatchReads):  # a model that is not built from these layers
        return reads
    modules = list(model.modules())
    sizes = [module.size for module in modules if isinstance(module, Embedding) and module.takes_media]
    return BatchReads(
        tuple(sorted({name for module in modules for name in getattr(module, "row_values", ())})),
        any(isinstance(module, Rope) and module.axis_of_pair is not None for module in modules),
        max(sizes, default=0),
        max((getattr(module, "target_state_size", 0) for module in modules), default=0),
        next(
            (getattr(each, "dtype", torch.float32) for each in modules if hasattr(each, "target_state_size")),
            torch.float32,
        ),
    )
