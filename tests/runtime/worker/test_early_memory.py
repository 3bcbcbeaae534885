"""Memory of host pages is allocated in the background."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import KVSpec
from runtime.worker import early_memory
from runtime.worker.early_memory import allocate_early


def resident(tensor: torch.Tensor) -> list[bool]:
    """Return whether each page of the tensor's memory is allocated."""
    first, size = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = file.read(size * 8)
    return [bool(entries[8 * i + 7] & 0xC0) for i in range(size)]  # present or swapped


@pytest.mark.parametrize("in_blocks", [False, True])
def test_memory_after_the_first_rows_is_allocated_and_keeps_its_content(
    in_blocks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(early_memory, "CHUNK_BYTES", 3 * mmap.PAGESIZE)
    specs = {0: KVSpec(4, 64), 1: KVSpec(4, 64)}
    pool = KVPool(specs, 1, 16, torch.float32, "cpu", num_host_pages=12, in_blocks=in_blocks)
    pool.host[1].v[7] = 3.0
    allocate_early(pool.host_tensors, 4).join()
    for tensor in pool.host_tensors:
        per_row = tensor[0].nbytes // mmap.PAGESIZE
        pages = resident(tensor)
        assert all(pages[4 * per_row :])
        assert not any(pages[: 4 * per_row - 1])
    assert (pool.host[1].v[7] == 3.0).all()
    assert not pool.host[0].k.any()


def test_the_thread_ends_when_the_memory_is_freed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(early_memory, "CHUNK_BYTES", mmap.PAGESIZE)
    pool = KVPool.uniform(1, 1, 64, 8, 128, torch.float32, "cpu", num_host_pages=4096)
    thread = allocate_early(pool.host_tensors, 0)
    del pool
    thread.join(60)
    assert not thread.is_alive()
