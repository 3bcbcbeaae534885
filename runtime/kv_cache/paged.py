"""The paged KV cache of one layer."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Self
from weakref import finalize

import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions
from ops.attention.native import attend_mutually
from ops.latent import LatentWeights
from ops.machine import GIB
from ops.rope import LatentNorm, Rotation
from ops.select import Kernels
from runtime.errors import ConfigurationError
from runtime.kv_cache.kinds import PAGED
from runtime.layers.forward_batch import ForwardBatch, KVSpec


class PagedKVCache(NamedTuple):
    """The keys and values of one layer in pages, each [num_pages + 1, K, page, D], updated in place.

    If keys contain the values (MLA), `k` and `v` are the same tensor. `kind` names the page table with the ids of these
    pages: the table of the prefix cache, or the table of a cache kind.
    """

    k: Tensor
    v: Tensor
    kind: str = PAGED

    @classmethod
    def zeros(
        cls,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str = PAGED,
    ) -> Self:
        shape = (num_pages + 1, spec.num_kv_heads, page_size, spec.head_dim)
        k = zeros(shape, dtype, device)
        return cls(k, k if spec.values_in_keys else zeros(shape, dtype, device), kind)

    @classmethod
    def in_host_memory(
        cls, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Create pages of the same layout in host memory, without a scratch page; page-locked for a GPU."""
        cache = cls.zeros(spec, num_pages - 1, page_size, dtype, torch.device("cpu"))
        if device.type == "cuda":
            for tensor in cache.tensors:
                _lock_pages(tensor)
        return cache

    @classmethod
    def in_blocks(
        cls,
        specs: Mapping[int, KVSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[dict[int, PagedKVCache], Tensor]:
        """Create the host pages of all layers. Each page is one contiguous block over all layers.

        Returns the caches, and the blocks [num_pages, elements per page]. Each cache is a view of the blocks. It has
        the layout of `in_host_memory`, except for the stride between pages.
        """
        sizes = {
            index: (spec.num_kv_heads * page_size * spec.head_dim, 1 if spec.values_in_keys else 2)
            for index, spec in specs.items()
        }
        width = sum(size * count for size, count in sizes.values())
        blocks = zeros((num_pages, width), dtype, torch.device("cpu"))
        if device.type == "cuda":
            _lock_pages(blocks)
        caches, start = {}, 0
        for index, spec in specs.items():
            size, count = sizes[index]
            parts = [
                blocks[:, start + size * part : start + size * (part + 1)].unflatten(
                    1, (spec.num_kv_heads, page_size, spec.head_dim)
                )
                for part in range(count)
            ]
            caches[index] = cls(parts[0], parts[-1])
            start += size * count
        return caches, blocks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache: one if `k` and `v` are the same tensor, otherwise two."""
        return (self.k,) if self.v is self.k else (self.k, self.v)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def store(self, kernels: Kernels, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Mapping[str, float]) -> None:
        """Store keys and values [T, K, D] in the cache slots of their tokens."""
        metadata, fp8_scales = self._metadata(batch), self._fp8_scales(scales)
        kernels.store(k, v, self.k, self.v, metadata, **fp8_scales)
        if metadata.repeated is not None:
            tokens, again = metadata.repeated
            kernels.store(k[tokens], v[tokens], self.k, self.v, again, **fp8_scales)

    def rotate_store(
        self,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        scales: Mapping[str, float],
    ) -> Tensor:
        """Rotate (RoPE) queries [T, H, D] and keys [T, K, D], store keys and values, and return the rotated queries."""
        metadata = self._metadata(batch)
        if metadata.repeated is not None:
            q, k = kernels.norm_rotate(q, k, rotation)
            self.store(kernels, k, v, batch, scales)
            return q
        return kernels.rotate_store(q, k, v, self.k, self.v, metadata, rotation, **self._fp8_scales(scales))

    def rotate_store_latent(
        self,
        kernels: Kernels,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        norm: LatentNorm,
        rotation: Rotation,
        batch: ForwardBatch,
    ) -> Tensor:
        """Store normalised latent vectors [T, R] and rotated keys [T, P], and return the rotated `q_pe` [T, H, P]."""
        metadata = self._metadata(batch)
        if metadata.repeated is not None:
            q_pe, key_pe = kernels.norm_rotate(q_pe, k_pe.unsqueeze(1), rotation)
            key = kernels.join(kernels.rms_norm(latent, norm.weight, norm.eps), key_pe.squeeze(1))
            self.store(kernels, key, key, batch, {})
            return q_pe
        return kernels.rotate_store_latent(q_pe, latent, k_pe, norm, self.k, metadata, rotation)

    def attend(
        self,
        kernels: Kernels,
        q: Tensor,
        batch: ForwardBatch,
        scales: Mapping[str, float],
        options: AttentionOptions,
    ) -> Tensor:
        """Return the attention output [T, H, D] of queries [T, H, D] over their rows' pages (see `ops.attention`)."""
        if fp8_scales := self._fp8_scales(scales):
            options = options._replace(**fp8_scales)
        metadata = self._metadata(batch)
        out = kernels.attend(q, self.k, self.v, metadata, options)
        if metadata.mutual_spans:
            attend_mutually(out, q, self.k, self.v, metadata, options)
        return out

    def attend_latent(
        self,
        kernels: Kernels,
        q_nope: Tensor,
        q_pe: Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Return the attention output [T, H * V] of queries over the latent vectors (MLA) of their rows.

        Each query consists of `q_nope` [T, H, N] and `q_pe` [T, H, P].
        """
        metadata = self._metadata(batch)
        return kernels.attend_latent(q_nope, q_pe, self.k, weights, metadata, options, kernels.attend)

    def _metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        return batch.attention if self.kind == PAGED else batch.kinds[self.kind].attention

    def _fp8_scales(self, scales: Mapping[str, float]) -> Mapping[str, float]:
        return scales if self.k.dtype.itemsize == 1 else {}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, its memory is not used before it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _lock_pages(tensor: Tensor) -> None:
    """Page-lock the tensor's memory for the GPU until the tensor is freed.

    `torch.empty(pin_memory=True)` would round each size up to a power of two.
    """
    driver: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = int(driver.cudaHostRegister(address, tensor.nbytes, 0))
    if status:
        raise ConfigurationError(
            f"The driver cannot lock {tensor.nbytes / GIB:.2f} GiB of host memory for the GPU (CUDA error {status}). "
            "Lower --swap-space, or raise the limit of locked memory (ulimit -l)."
        )
    finalize(tensor.untyped_storage(), driver.cudaHostUnregister, address)
