"""Settings for every test: one torch thread, no network, hypothesis without deadlines, logging left alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Set before torch is imported: two threads beside another busy process make a step twenty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def _logging_left_alone() -> Iterator[None]:
    """Fails a test that leaves the log configured, as a server does in its process: later tests would see no line."""
    log = logging.getLogger("penstock")
    before = log.propagate, log.level, list(log.handlers)
    yield
    after = log.propagate, log.level, list(log.handlers)
    log.propagate, log.level, log.handlers = before
    assert after == before
