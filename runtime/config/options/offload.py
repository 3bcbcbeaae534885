"""Options about weights kept outside the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import planned


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadArgs:
    """Weights in host memory."""

    cpu_offload_gb: Annotated[
        int,
        planned("Gigabytes of weights kept in host memory and copied to the device in every step.", low=0),
    ] = 0
    offload_group_size: Annotated[
        int, planned("Layers in one group, of which some are kept in host memory; -1 turns it off.", low=-1)
    ] = -1
    offload_num_in_group: Annotated[
        int, planned("Layers of each group that are kept in host memory.", low=1)
    ] = 1
    offload_prefetch_step: Annotated[int, planned("How many layers ahead weights are fetched.", low=1)] = 1
    offload_mode: Annotated[
        str,
        planned("Where offloaded weights are kept.", choices=("meta", "cpu", "shm_cpu", "sharded_gpu")),
    ] = "cpu"
    enable_memory_saver: Annotated[
        bool,
        planned("Allow the memory of weights and KV cache to be given back and taken again while running."),
    ] = False
