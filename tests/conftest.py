"""Settings for every test: one torch thread, no network, fixed random seeds, no deadlines, unchanged logging."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

from ops.cpp.build import BuildError, build
from ops.machine import Machine

# Set before torch is imported. With two threads next to another busy process, a step would take twenty times longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def _seed() -> None:
    """Seed torch, which otherwise starts each process with a random seed."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    del item
    _seed()


@pytest.fixture(autouse=True, scope="session")
def _kernels() -> None:
    """Compile the C++ kernels first. An engine would otherwise begin without them, and change to them in some test."""
    machine = Machine.probe()
    if machine.compiler is not None and not machine.prebuilt:
        with suppress(BuildError):
            build(machine.compiler, machine.cpu_flags)


@pytest.fixture(autouse=True)
def _logging_left_alone() -> Iterator[None]:
    """Fail a test that leaves logging configured, as a server does, because later tests would see no log lines."""
    log = logging.getLogger("penstock")
    before = log.propagate, log.level, list(log.handlers)
    yield
    # A thread of an engine whose start was cancelled may still load a model. transformers then replaces functions of
    # its classes for the whole process, which would break models that the next test loads.
    facts = sys.modules.get("runtime.models.by_transformers.facts")
    if facts is not None:
        with facts.CREATING:
            pass
    after = log.propagate, log.level, list(log.handlers)
    log.propagate, log.level, log.handlers = before
    assert after == before
