from __future__ import annotations

import ctypes
import os

import pytest
import torch

from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import KVSpec


def test_pool_holds_its_pages_and_one_for_scratch() -> None:
    pool = KVPool.uniform(3, 5, 4, 2, 8, torch.bfloat16, "cpu")
    for index in range(3):
        k, v, _ = pool[index]
        assert k.shape == v.shape == (6, 2, 4, 8)
        assert k.is_contiguous()
        assert not k.any()
    assert pool.scratch_page == 5
    assert pool.nbytes == 3 * 2 * 6 * 2 * 4 * 8 * 2


def test_a_forked_process_writes_to_a_copy() -> None:
    pool = KVPool.uniform(1, 1, 1, 1, 1, torch.float32, "cpu")
    pool[0].k.fill_(1)
    address = pool[0].k.data_ptr()
    child = os.fork()
    if child == 0:  # the child process must not use torch, whose threads do not exist there
        ctypes.c_float.from_address(address).value = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool[0].k.eq(1).all()


def test_layers_do_not_share_memory() -> None:
    pool = KVPool.uniform(2, 1, 1, 1, 1, torch.float32, "cpu")
    pool[0].k.fill_(1)
    assert not pool[0].v.any()
    assert not pool[1].k.any()


def test_a_stage_has_the_caches_of_its_own_layers() -> None:
    spec = KVSpec(1, 1)
    pool = KVPool({3: spec, 4: spec}, 1, 1, torch.float32, "cpu")
    assert pool[3].k is not pool[4].k
    with pytest.raises(KeyError):
        pool[0]
