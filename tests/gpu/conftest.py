"""Tests that need a CUDA device. Without one they are skipped with the reason.

With PENSTOCK_TEST_DEVICE=cpu they run on the CPU as a rehearsal (`just gpu-contact --device cpu`): one case of each
kind and a few families, or all with PENSTOCK_TEST_EVERY=1. Their code is in `tests/on_device`, where a test of the
ordinary suite runs it on the CPU. This module does not import torch before a device is known to exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ops.machine import Machine

HERE = Path(__file__).parent
DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cuda")
SHORT = DEVICE == "cpu" and not os.environ.get("PENSTOCK_TEST_EVERY")
REHEARSED = ("llama", "qwen3", "gemma3", "gpt_oss", "olmoe", "gpt_neox")
TIMEOUT_S = 600  # long enough to compile kernels at their first launch


@cache
def lacking() -> str:
    """Return what this machine lacks to run these tests, or ""."""
    if DEVICE == "cpu":
        return ""
    machine = Machine.probe()
    if not machine.gpus:
        return "this machine has no NVIDIA GPU"
    if machine.torch_cuda is None:
        return "the installed torch is built without CUDA"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if lacking():
                item.add_marker(pytest.mark.skip(reason=lacking()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List cases and families if the tests can run; otherwise one case represents all."""
    if "family" in metafunc.fixturenames and not _parametrized(metafunc, "family"):
        if lacking():
            metafunc.parametrize("family", ["every family"])
        elif SHORT:
            metafunc.parametrize("family", REHEARSED)
        else:
            from greedy import FAMILIES

            metafunc.parametrize("family", FAMILIES)
    if "check" in metafunc.fixturenames:
        if lacking():
            metafunc.parametrize("check", ["every case"])
        else:
            from on_device.operations import checks, one_of_each

            found = one_of_each() if SHORT else list(checks(large=DEVICE != "cpu"))
            metafunc.parametrize("check", found, ids=str)


def _parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    return any(mark.args[0] == name for mark in metafunc.definition.iter_markers("parametrize"))


@pytest.fixture
def device() -> Iterator[str]:
    """Return the first GPU. Frees the allocator's memory after the test."""
    import gc

    import torch

    yield DEVICE
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()
