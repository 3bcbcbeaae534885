"""Around latent attention in C++: every head's product with its own weight (`ops/cpp/source/heads.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address
from ops.cpp.structures import CopyHeads, Pack, Product, ProductHeads
from ops.latent import native


class PackedHeads(Tensor):
    """Weights [H, O, I], each packed in panels of its own: a view of their memory, filled up to whole panels."""


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """All of `ops.latent`."""
    operations = (prepare_heads, absorb, expand, join)
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


def absorb(launcher: KernelLauncher, plain: Tensor, turned: Tensor, keys: Tensor) -> Tensor:
    """Queries for the cache."""
    if not isinstance(keys, PackedHeads):
        return native.absorb(plain, turned, keys)
    rank = keys.shape[1]
    out = launcher.empty((*plain.shape[:2], rank + turned.shape[2]), plain.dtype)
    _multiply(launcher, plain, keys, out[..., :rank])
    _copy(launcher, turned, out[..., rank:])
    return out


def expand(launcher: KernelLauncher, read: Tensor, values: Tensor, size: int) -> Tensor:
    """What heads make of what they read."""
    if not isinstance(values, PackedHeads):
        return native.expand(read, values, size)
    out = launcher.empty((*read.shape[:2], size), read.dtype)
    _multiply(launcher, read, values, out)
    return out.flatten(1)


def join(launcher: KernelLauncher, latent: Tensor, rotated: Tensor) -> Tensor:
    """A token's key."""
    if latent.dtype not in TYPES:
        return native.join(latent, rotated)
    rank = latent.shape[1]
    out = launcher.empty((len(latent), 1, rank + rotated.shape[1]), latent.dtype)
    _copy(launcher, latent.unsqueeze(1), out[..., :rank])
    _copy(launcher, rotated.unsqueeze(1), out[..., rank:])
    return out


def _multiply(launcher: KernelLauncher, x: Tensor, weight: PackedHeads, out: Tensor) -> None:
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
    operands = ProductHeads(product, heads, x.stride(1), out.stride(0), out.stride(1))
    launcher.launch("product_heads", x.dtype, operands)


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
