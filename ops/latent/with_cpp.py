"""Latent attention in C++: products of every head with its own weight (`ops/cpp/source/heads.h`), and attention with
expanded keys and values (`attend_expanded.h`); that over the latent vectors is an attention as others are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.with_cpp import computes, step_in
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, cache_type
from ops.cpp.structures import AttendExpanded, CopyHeads, Pack, Product, ProductHeads
from ops.latent import LatentWeights, native


class PackedHeads(Tensor):
    """Weights [H, O, I], each packed in panels of its own: a view of their memory, filled up to whole panels."""


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """All of `ops.latent`."""
    operations = (prepare_heads, join, attend_latent)
    return {operation.__name__: partial(operation, launcher) for operation in operations}


def prepare_heads(launcher: KernelLauncher, weight: Tensor) -> Tensor:
    """The weights in panels; as torch takes them where the kernels do not."""
    dtype, (heads, out_size, in_size) = weight.dtype, weight.shape
    if weight.device.type != "cpu" or dtype not in TYPES or in_size * dtype.itemsize % 4:
        return native.prepare_heads(weight)
    width = launcher.library.panel_width
    padded = -(-out_size // width) * width
    memory = torch.empty(heads * padded * in_size, dtype=dtype)
    for plain, packed in zip(weight.detach().contiguous(), memory.view(heads, -1), strict=True):
        launcher.launch("pack", dtype, Pack(address(plain), address(packed), in_size, out_size))
    shape, strides = (heads, out_size, in_size), (padded * in_size, in_size, 1)
    return memory.as_strided(shape, strides).as_subclass(PackedHeads)


def join(launcher: KernelLauncher, latent: Tensor, rotated: Tensor) -> Tensor:
    """A token's key."""
    if latent.dtype not in TYPES:
        return native.join(latent, rotated)
    rank = latent.shape[1]
    out = launcher.empty((len(latent), 1, rank + rotated.shape[1]), latent.dtype)
    _copy(launcher, latent.unsqueeze(1), out[..., :rank])
    _copy(launcher, rotated.unsqueeze(1), out[..., rank:])
    return out


def attend_latent(
    launcher: KernelLauncher,
    plain: Tensor,
    turned: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Attention of all rows: which of them are expanded the kernels find out for themselves, step by step.

    Nothing is expanded where the kernels do not take the weights or the pool.
    """
    packed = [isinstance(weight, PackedHeads) for weight in (weights.absorbing, weights.values)]
    if not any(packed):
        return native.attend_latent(plain, turned, pool, weights, metadata, options, attend)
    width = weights.absorbing.shape[1] + turned.shape[2]
    expands = all(packed) and weights.expand_from is not None and computes(plain.dtype, width, pool)
    least = weights.expand_from if expands else None
    query = _absorb(launcher, plain, turned, weights.absorbing, metadata, least)
    read = attend(query, pool, pool, metadata, options._replace(below=least))
    out = _expand(launcher, read, weights, metadata, least)
    if least is not None:
        operands = AttendExpanded(
            plain=address(plain),
            turned=address(turned),
            plain_stride=plain.stride(0),
            plain_head=plain.stride(1),
            turned_stride=turned.stride(0),
            turned_head=turned.stride(1),
            pool=address(pool),
            keys=address(weights.expanding),
            values=address(weights.values),
            out=address(out),
            num_heads=plain.shape[1],
            rank=weights.values.shape[2],
            plain_dim=plain.shape[2],
            turned_dim=turned.shape[2],
            value_dim=weights.value_dim,
            scale=options.scale,
            type=cache_type(pool, plain.dtype),
            expand_from=least,
        )
        launcher.launch("attend_expanded", plain.dtype, operands, step_in(metadata))
    return out.flatten(1)


def _absorb(
    launcher: KernelLauncher,
    plain: Tensor,
    turned: Tensor,
    absorbing: Tensor,
    metadata: AttentionMetadata,
    below: int | None,
) -> Tensor:
    """What the cache is asked with, [T, H, R + P]."""
    if not isinstance(absorbing, PackedHeads):
        return native.absorb(plain, turned, absorbing)
    rank = absorbing.shape[1]
    out = launcher.empty((*plain.shape[:2], rank + turned.shape[2]), plain.dtype)
    _multiply(launcher, plain, absorbing, out[..., :rank], metadata, below)
    _copy(launcher, turned, out[..., rank:])
    return out


def _expand(
    launcher: KernelLauncher,
    read: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    below: int | None,
) -> Tensor:
    """What heads make of what they read, [T, H, V]."""
    if not isinstance(weights.values, PackedHeads):
        return native.expand(read, weights.values).view(*read.shape[:2], -1)
    out = launcher.empty((*read.shape[:2], weights.value_dim), read.dtype)
    _multiply(launcher, read, weights.values, out, metadata, below)
    return out


def _multiply(
    launcher: KernelLauncher,
    x: Tensor,
    weight: PackedHeads,
    out: Tensor,
    metadata: AttentionMetadata,
    below: int | None,
) -> None:
    """out[:, h] = x[:, h] @ weight[h].T of all tokens, or those in rows of fewer than `below`."""
    heads, out_size, in_size = weight.shape
    product = Product(
        x=address(x),
        x_stride=x.stride(0),
        rows=launcher.tokens(x),
        weight=address(weight),
        out=address(out),
        in_size=in_size,
        out_size=out_size,
    )
    operands = ProductHeads(product, heads, x.stride(1), out.stride(0), out.stride(1), below or 0)
    launcher.launch("product_heads", x.dtype, operands, step_in(metadata) if below else None)


def _copy(launcher: KernelLauncher, x: Tensor, out: Tensor) -> None:
    operands = CopyHeads(
        x=address(x),
        out=address(out),
        tokens=launcher.tokens(x),
        heads=x.shape[1],
        size=x.shape[2],
        x_stride=x.stride(0),
        x_head=x.stride(1),
        out_stride=out.stride(0),
        out_head=out.stride(1),
    )
    launcher.launch("copy_heads", x.dtype, operands)
