"""New weights for a model that is loaded: layers are prepared again, in the memory that recorded steps read.

No route leads here yet: `/update_weights_from_disk` and its like answer 501 (`serve/unsupported.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.layers.weight import Weighted
from runtime.models.decoder import Decoder
from runtime.models.loader import ignored_names
from runtime.models.parameters import allocate, check_total, own_shards


def update_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Give the layers that `tensors` names new weights: whole checkpoint tensors by name, of any dtype.

    To be called between steps. Weights keep the memory that they have where their layout allows it, so that recorded
    and captured steps see the new ones. Raises CheckpointError, and changes nothing, for a tensor that no layer of this
    rank has, one of another shape, and a layer of which only some tensors are there.
    """
    tied = model.head is not None and model.head.weight is None
    tensors = {name: tensors[name] for name in tensors.keys() - ignored_names(tensors, tied=tied)}
    layers = [(module, own_shards(module)) for module in model.modules() if isinstance(module, Weighted)]
    layers = [(module, own) for module, own in layers if not tensors.keys().isdisjoint(own)]
    wanted = {name: shards for _, own in layers for name, shards in own.items()}
    check_total(wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    dtype = model.dtype
    with torch.inference_mode():
        for module, _ in layers:
            _renew(module, tensors, dtype)


def _renew(module: Weighted, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill a layer that has its weights already, and prepare them again if they were prepared."""
    before = dict(module.named_parameters(recurse=False))
    with torch.device("meta"):
        module.allocate()
    if before:
        allocate(module, dtype, next(iter(before.values())).device)
    for name, shards in own_shards(module).items():
        for shard in shards:
            if name in tensors:
                shard.take(tensors[name][shard.cut])
            elif shard.default is not None:
                shard.target.fill_(shard.default)
    module.prepare()
    for name, now in list(module.named_parameters(recurse=False)):
        if name in before and now is not before[name] and _same_layout(before[name], now):
            before[name].untyped_storage().copy_(now.untyped_storage())
            setattr(module, name, before[name])


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes of one tensor can take the place of the other's."""
    if type(one) is not type(other) or one.is_mkldnn or other.is_mkldnn:
        return False
    layouts = ((x.dtype, x.shape, x.stride(), x.untyped_storage().nbytes()) for x in (one, other))
    return next(layouts) == next(layouts)
