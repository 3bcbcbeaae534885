"""Latent attention in C++.

The kernel of `ops/cpp/source/heads.h` multiplies each head by its weight. The kernel of `attend_expanded.h` computes
rows with expanded keys and values. For absorbed rows, a kernel of `ops.attention` attends over the latent vectors.
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
    """A view [H, O, I] of weights that are packed into panels. In memory, each head is padded to a whole panel."""


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.latent`."""
    operations = (prepare_heads, join, attend_latent)
    return {operation.__name__: partial(operation, launcher) for operation in operations}


def prepare_heads(launcher: KernelLauncher, weight: Tensor) -> Tensor:
    """Pack the weights into panels, or prepare them for `native` if the kernels do not support them."""
    dtype, (heads, out_size, in_size) = weight.dtype, weight.shape
    if weight.device.type != "cpu" or dtype not in TYPES or in_size * dtype.itemsize % 4:
        return native.prepare_heads(weight)
    width = launcher.library.panel_width
    padded = -(-out_size // width) * width
    memory = torch.empty(heads * padded * in_size, dtype=dtype)
    for head_weight, packed in zip(weight.detach().contiguous(), memory.view(heads, -1), strict=True):
        launcher.launch(
            "pack",
            dtype,
            Pack(weight=address(head_weight), packed=address(packed), in_size=in_size, out_size=out_size),
        )
    shape, strides = (heads, out_size, in_size), (padded * in_size, in_size, 1)
    return memory.as_strided(shape, strides).as_subclass(PackedHeads)


def join(launcher: KernelLauncher, latent: Tensor, k_pe: Tensor) -> Tensor:
    if latent.dtype not in TYPES:
        return native.join(latent, k_pe)
    rank = latent.shape[1]
    out = launcher.empty((len(latent), 1, rank + k_pe.shape[1]), latent.dtype)
    _copy(launcher, latent.unsqueeze(1), out[..., :rank])
    _copy(launcher, k_pe.unsqueeze(1), out[..., rank:])
    return out


def attend_latent(
    launcher: KernelLauncher,
    q_nope: Tensor,
    q_pe: Tensor,
    pool: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Compute short rows absorbed and long rows expanded (see `ops.latent`).

    The kernels themselves select the rows to expand, because a captured graph runs steps with other rows. No row is
    expanded if the kernels do not support the weights or the pool.
    """
    packed = [isinstance(weight, PackedHeads) for weight in (weights.absorbing, weights.values)]
    if not any(packed):
        return native.attend_latent(q_nope, q_pe, pool, weights, metadata, options, attend)
    width = weights.absorbing.shape[1] + q_pe.shape[2]
    expands = all(packed) and weights.expand_from is not None and computes(q_nope.dtype, width, pool)
    expand_from = weights.expand_from if expands else None
    query = _absorb(launcher, q_nope, q_pe, weights.absorbing, metadata, expand_from)
    attended = attend(query, pool, pool, metadata, options._replace(below=expand_from))
    out = _expand(launcher, attended, weights, metadata, expand_from)
    if expand_from is not None:
        operands = AttendExpanded(
            q_nope=address(q_nope),
            q_pe=address(q_pe),
            q_nope_stride=q_nope.stride(0),
            q_nope_head=q_nope.stride(1),
            q_pe_stride=q_pe.stride(0),
            q_pe_head=q_pe.stride(1),
            pool=address(pool),
            keys=address(weights.expanding),
            values=address(weights.values),
            out=address(out),
            num_heads=q_nope.shape[1],
            rank=weights.values.shape[2],
            nope_dim=q_nope.shape[2],
            rope_dim=q_pe.shape[2],
            value_dim=weights.value_dim,
            scale=options.scale,
            type=cache_type(pool, q_nope.dtype),
            expand_from=expand_from,
        )
        launcher.launch("attend_expanded", q_nope.dtype, operands, step_in(metadata))
    return out.flatten(1)


def _absorb(
    launcher: KernelLauncher,
    q_nope: Tensor,
    q_pe: Tensor,
    absorbing: Tensor,
    metadata: AttentionMetadata,
    below: int | None,
) -> Tensor:
    """Return the absorbed queries [T, H, R + P]. Rows with `below` tokens or more may stay uninitialised."""
    if not isinstance(absorbing, PackedHeads):
        return native.absorb(q_nope, q_pe, absorbing)
    rank = absorbing.shape[1]
    out = launcher.empty((*q_nope.shape[:2], rank + q_pe.shape[2]), q_nope.dtype)
    _multiply(launcher, q_nope, absorbing, out[..., :rank], metadata, below)
    _copy(launcher, q_pe, out[..., rank:])
    return out


def _expand(
    launcher: KernelLauncher,
    attended: Tensor,
    weights: LatentWeights,
    metadata: AttentionMetadata,
    below: int | None,
) -> Tensor:
    """Return the output of the heads [T, H, V]. Rows with `below` tokens or more may stay uninitialised."""
    if not isinstance(weights.values, PackedHeads):
        return native.expand(attended, weights.values).view(*attended.shape[:2], -1)
    out = launcher.empty((*attended.shape[:2], weights.value_dim), attended.dtype)
    _multiply(launcher, attended, weights.values, out, metadata, below)
    return out


def _multiply(
    launcher: KernelLauncher,
    x: Tensor,
    weight: PackedHeads,
    out: Tensor,
    metadata: AttentionMetadata,
    below: int | None,
) -> None:
    """Compute out[:, h] = x[:, h] @ weight[h].T for rows with fewer than `below` tokens, or for all rows if None."""
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
    operands = ProductHeads(
        product=product,
        heads=heads,
        x_head=x.stride(1),
        out_stride=out.stride(0),
        out_head=out.stride(1),
        below=below or 0,
    )
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
