"""Estimate the memory of adapter slots from the headers of a checkpoint. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from runtime.config.plan import LoraPlan
from runtime.config.resolve.lora import LEAST_MAX_RANK
from runtime.errors import CheckpointError
from runtime.loading.adapter_config import read_config
from runtime.loading.checkpoint import find_weights, read_header

_MATRIX = re.compile(r"(?:^|.*\.)(?:layers|h|blocks|block)\.\d+\.(?:(?!experts\.\d).)*?(?P<layer>\w+)\.weight")


def largest_rank(plan: LoraPlan) -> int:
    """Return the rank of the adapter slots: the option's value or, without one, the largest rank of local adapters."""
    ranks: list[int] = []
    for source in plan.sources:
        try:
            ranks.append(read_config(Path(source.path)).rank)
        except CheckpointError:  # not downloaded yet, or invalid; with an invalid adapter, the start fails later
            continue
    return plan.max_rank or max(LEAST_MAX_RANK, *ranks, 1)


def slots_bytes(folder: str, plan: LoraPlan, rank: int, dtype_bytes: int) -> int | None:
    """Return the bytes of all slots on all ranks, or None if there are no unquantised weights in safetensors files."""
    try:
        files = find_weights(Path(folder), "safetensors")
        headers = [read_header(file) for file in files.files]
    except (CheckpointError, OSError):
        return None
    sizes = [
        sum(tensor.shape)
        for header in headers
        for name, tensor in header.items()
        if len(tensor.shape) == 2 and _is_target(name, plan.targets) and tensor.dtype in ("F32", "F16", "BF16")
    ]
    return plan.max_slots * rank * sum(sizes) * dtype_bytes if sizes else None


def _is_target(name: str, targets: Collection[str] | None) -> bool:
    found = _MATRIX.fullmatch(name)
    return found is not None and (targets is None or found["layer"] in targets)
