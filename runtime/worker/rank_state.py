"""The state of a rank that verbs (rank commands, see `runtime.worker.verbs`) read and change."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from runtime.errors import InvalidRequest
from runtime.kv_cache.pools import KVPool
from runtime.loading.weight_update import LoadedWeights
from runtime.worker.adapters import Adapters
from runtime.worker.device import Device
from runtime.worker.expert_moves import RankExperts
from runtime.worker.page_copies import PageCopier
from runtime.worker.page_io import PageIO
from runtime.worker.step_profiler import StepProfiler
from runtime.worker.weight_transfer import Received, TransferGroup


@dataclass(slots=True)
class RankState:
    """The state of a rank that verbs read and change."""

    device: Device
    leads: bool  # whether this is rank 0, which samples
    rank: int = 0  # rank among all ranks of this replica
    pool: KVPool | None = None
    weights: LoadedWeights | None = None  # None: the weights cannot be replaced
    adapters: Adapters | None = None  # None: the engine serves no adapters
    profiler: StepProfiler | None = None
    copier: PageCopier | None = None
    pages: PageIO | None = None  # None: no store can be attached, because host pages are not contiguous blocks
    # Process groups with trainers or new servers, by name.
    groups: dict[str, TransferGroup] = field(default_factory=dict)
    experts: RankExperts | None = None  # None: the experts of this rank are neither recorded nor moved
    received: deque[Received] = field(default_factory=deque)  # parts of a transfer that are not yet staged

    @property
    def has_initial_weights(self) -> bool:
        """Whether the weights are those of the first checkpoint, and no update or release is in progress."""
        return self.weights is not None and self.weights.are_initial

    @property
    def loaded(self) -> LoadedWeights:
        """The object that replaces the weights. Raises InvalidRequest if they cannot be replaced."""
        if self.weights is None:
            raise InvalidRequest("The weights of this model cannot be replaced while it runs.")
        return self.weights
