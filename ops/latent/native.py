"""Around latent attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_heads(weight: Tensor) -> Tensor:
    """[H, O, I] -> [H, I, O] (see `ops.latent`)."""
    return weight.transpose(1, 2).contiguous()


def absorb(plain: Tensor, turned: Tensor, keys: Tensor) -> Tensor:
    """Queries for the cache (see `ops.latent`)."""
    absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
    return torch.cat((absorbed, turned), dim=-1)


def expand(read: Tensor, values: Tensor, size: int) -> Tensor:
    """What heads make of what they read (see `ops.latent`)."""
    latent = read[..., : values.shape[1]]
    return torch.bmm(latent.transpose(0, 1), values).transpose(0, 1).flatten(1)


def join(latent: Tensor, rotated: Tensor) -> Tensor:
    """A token's key (see `ops.latent`)."""
    return torch.cat((latent, rotated), dim=-1).unsqueeze(1)
