"""Settings for every test: one torch thread, no network, hypothesis without deadlines."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Set before torch is imported: two threads beside another busy process make a step twenty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
