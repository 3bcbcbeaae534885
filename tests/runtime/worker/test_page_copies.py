"""Page copies are ordered with the steps, for every order of the device's streams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import late_steps
from fake_device import LateDevice
from ops.kv import native
from runtime.batch import Batch, PageCopy
from runtime.errors import ConfigurationError
from runtime.kv_cache.paged import PagedKVCache
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import KVSpec
from runtime.scheduler import budget
from runtime.worker.page_copies import PageCopier
from runtime.worker.step_inputs import Staging

NUM_PAGES = 24
LONG = [([3 + i, 9, 4 + 3 * i], 14 + i) for i in range(4)]
PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(5)]


@cache
def plainly(prompts: str) -> list[list[int]]:
    """Return the outputs on a device that executes everything immediately, without copies."""
    return late_steps.outputs({"PROMPTS": PROMPTS, "LONG": LONG}[prompts])


def shuttle(steps: late_steps.Steps) -> None:
    """Before each step, move the pages of its rows to the host, to other host pages, and back."""
    launch, random = steps.launch, np.random.default_rng(0)

    def launch_with_copies(batch: Batch) -> None:
        pages = np.unique(batch.page_table).astype(np.int32)
        first, second = random.permutation(2 * NUM_PAGES).astype(np.int32)[: 2 * len(pages)].reshape(2, -1)
        copies = (
            PageCopy("device", "host", pages, first),
            PageCopy("host", "host", first, second),
            PageCopy("host", "device", second, pages),
        )
        launch(replace(batch, copies=copies))

    steps.launch = launch_with_copies


def outputs(device: LateDevice | None, **options: Any) -> list[list[int]]:
    options = {"num_pages": NUM_PAGES, "num_host_pages": 2 * NUM_PAGES, "change": shuttle} | options
    return late_steps.outputs(PROMPTS, device=device, **options)


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32),
    haste=st.sampled_from([0.0, 0.3, 0.9]),
    depth=st.integers(0, 2),
    sizes=st.sampled_from([(), (1, 2, 4)]),
)
def test_any_legal_order_of_copies_gives_the_same_tokens(seed: int, haste: float, depth: int, sizes: tuple[int, ...]):
    found = outputs(LateDevice(Random(seed), haste), depth=depth, sizes=sizes)
    assert found == plainly("PROMPTS")


def there_and_back(device: LateDevice) -> list[float]:
    """Return what the forward stream reads from a page that it wrote and that was copied to the host and to another
    page.
    """
    pool = KVPool.uniform(1, 8, 4, 1, 1, torch.float32, "cpu", num_host_pages=4)
    copier = PageCopier([pool], native.copy_pages, device, Staging(device))
    keys = pool[0].k
    device.adopt(keys)
    with device.forward():
        keys[3] = 5.0
        copier.enqueue(
            [
                PageCopy("device", "host", np.array([3], np.int32), np.array([1], np.int32)),
                PageCopy("host", "device", np.array([1], np.int32), np.array([6], np.int32)),
            ]
        )
        keys[3] = 7.0
        (found,), done = device.download([keys[6]])
    done.wait()
    return found.flatten().tolist()


DEVICES = [(seed, haste) for seed in range(10) for haste in (0.0, 0.2, 0.9)]


def test_copies_read_what_earlier_steps_wrote_and_later_ones_read_the_copies():
    assert all(there_and_back(LateDevice(Random(seed), haste)) == [5.0] * 4 for seed, haste in DEVICES)


@pytest.mark.parametrize("lost", [("forward", "copy"), ("copy", "forward")])
def test_a_stream_that_does_not_wait_for_the_other_is_noticed(lost: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    order = LateDevice.order
    monkeypatch.setattr(
        LateDevice,
        "order",
        lambda self, first, then: None if (first, then) == lost else order(self, first, then),
    )
    assert any(there_and_back(LateDevice(Random(seed), haste)) != [5.0] * 4 for seed, haste in DEVICES)


def test_steps_notice_copies_that_do_not_wait_for_them(monkeypatch: pytest.MonkeyPatch):
    """Without this call the order would still be right, because a step's inputs follow its page copies on the same
    stream.
    """
    order = LateDevice.order
    monkeypatch.setattr(LateDevice, "order", lambda self, first, then: first == "copy" and order(self, first, then))
    expected = plainly("PROMPTS")
    assert any(outputs(LateDevice(Random(seed), 0.2)) != expected for seed in range(5))


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32),
    haste=st.sampled_from([0.0, 0.3, 0.9]),
    depth=st.integers(0, 2),
    sizes=st.sampled_from([(), (1, 2, 4)]),
)
def test_retracted_sequences_come_back_in_any_legal_order(seed: int, haste: float, depth: int, sizes: tuple[int, ...]):
    copies: list[PageCopy] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "RESERVED_OUTPUT_TOKENS", 1)
        found = late_steps.outputs(
            LONG,
            device=LateDevice(Random(seed), haste),
            depth=depth,
            sizes=sizes,
            num_pages=10,
            num_host_pages=NUM_PAGES,
            swap=True,
            watch=lambda batch: copies.extend(batch.copies),
        )
    assert found == plainly("LONG")
    assert {copy.source for copy in copies} == {"device", "host"}


def test_copies_out_of_their_order_are_noticed():
    def reverse(steps: late_steps.Steps) -> None:
        launch = steps.launch
        steps.launch = lambda batch: launch(replace(batch, copies=batch.copies[::-1]))
        shuttle(steps)

    assert outputs(None, change=reverse) != plainly("PROMPTS")


def test_a_pool_that_does_not_exist_is_refused():
    steps = late_steps.Steps(NUM_PAGES, 4)
    page = np.zeros(1, np.int32)
    with pytest.raises(KeyError, match="disk"):
        steps.executor._copier.enqueue([PageCopy("device", "disk", page, page)])


class Driver:
    """A fake of the CUDA driver's functions that lock host memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.status:
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


def test_host_memory_is_locked_for_a_gpu_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    spec, gpu = KVSpec(2, 8), torch.device("cuda:0")
    cache = PagedKVCache.in_host_memory(spec, 3, 4, torch.float16, gpu)
    latent = PagedKVCache.in_host_memory(replace(spec, values_in_keys=True), 3, 4, torch.float16, gpu)
    assert sorted(driver.locked.values()) == [cache.k.nbytes] * 3
    view = cache.k[1:]
    del cache, latent
    assert len(driver.locked) == 1
    del view
    assert not driver.locked
    driver.status = 2
    with pytest.raises(ConfigurationError, match="Lower --swap-space"):
        PagedKVCache.in_host_memory(spec, 3, 4, torch.float16, gpu)
