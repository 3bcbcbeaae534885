"""Views of each expert's memory in prepared weights, for moving experts between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import sizeof

import torch
from torch import Tensor

from ops.matmul.with_cpp import Header4, PackedWeight, PackedWeight4, PackedWeight8


def expert_pieces(tensors: Iterable[Tensor | None], num_experts: int) -> list[Tensor]:
    """Return views (uint8 [X, bytes]) of the memory of a mixture's tensors. Row x of each view belongs to expert x.

    The rows of an expert in all views are all its weights. Raises ValueError if the memory is not divided by expert.
    """
    return [piece for tensor in tensors if tensor is not None for piece in _pieces(tensor, num_experts)]


def _pieces(tensor: Tensor, num_experts: int) -> list[Tensor]:
    if tensor.is_mkldnn:
        raise ValueError("oneDNN's packed weights are not divided by expert.")
    parts = getattr(tensor, "parts", None)  # only weights that `ops.matmul.with_triton` packs have parts
    if parts is not None:
        return [part.view(num_experts, -1).view(torch.uint8) for part in parts if part is not None]
    if not isinstance(tensor, PackedWeight | PackedWeight8 | PackedWeight4):
        return [tensor.detach().view(num_experts, -1).view(torch.uint8)]
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    blocks = [memory]
    if isinstance(tensor, PackedWeight4):
        blocks = [memory[sizeof(Header4) :]]
    elif isinstance(tensor, PackedWeight8):  # scales of all experts, then codes
        first = tensor.storage_offset() * tensor.element_size()
        blocks = [memory[:first], memory[first:]]
    if any(len(part) % num_experts for part in blocks):
        raise ValueError("The packed weights are not divided by expert.")
    return [part.view(num_experts, -1) for part in blocks]
