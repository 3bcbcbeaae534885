"""The adapters of one rank: their shards in host memory, and the device slots from which layers read them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.batch import ADAPTER, AdapterPlacement, Batch
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import LoraPlan
from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading.adapter_config import read_config
from runtime.loading.adapter_files import check_copies, read_weights
from runtime.modeling.decoder import Decoder
from runtime.worker.adapter_slots import FittedAdapter, LayerSlots


class Adapters:
    """Allocates adapter slots in a model, loads adapters into host memory, and copies them into slots.

    `load` reads files on its own thread. All other methods must be called on the thread that enqueues steps.
    """

    def __init__(
        self,
        model: Decoder,
        plan: LoraPlan,
        facts: ModelFacts,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_transformers: bool = False,
    ) -> None:
        """Allocate slots in the layers that `plan` names. Raises CheckpointError if the model lacks such a layer."""
        self._max_rank = plan.max_rank
        self._device, self._facts = device, facts
        if by_transformers:
            from runtime.worker.adapter_modules import ModuleSlots  # here, because it imports transformers

            self._slots = ModuleSlots.of(model, plan.targets, device)
        else:
            self._slots = LayerSlots(model, plan, facts, dtype, device)
        self._loaded: dict[int, FittedAdapter] = {}  # adapter id -> adapter in host memory
        self._changed: set[int] = set()  # slots of adapters with changes that captured graphs do not compute
        self._reader = ThreadPoolExecutor(1, "penstock-adapters")

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return self._slots.nbytes

    def load(self, adapter_id: int, path: str) -> Future[bool]:
        """Read an adapter into host memory. The future's result says whether the adapter must be measured (DoRA).

        The future raises CheckpointError if the adapter does not fit this model.
        """
        return self._reader.submit(self._load, adapter_id, Path(path))

    def measure(self, adapter_id: int) -> bool:
        """Measure one more layer of a loaded adapter (DoRA). Return whether layers remain to be measured.

        For a layer with n inputs, this takes about as long as a step of n tokens. All ranks must call it at the same
        time.
        """
        adapter = self._loaded.get(adapter_id)
        return adapter is not None and adapter.measure()

    def drop(self, adapter_id: int) -> None:
        """Free an adapter's host memory. Unknown ids are ignored."""
        self._loaded.pop(adapter_id, None)

    def place(self, placement: AdapterPlacement) -> None:
        """Copy a loaded adapter into a slot on the device. Raises `InvalidRequest` if the adapter is not loaded."""
        adapter = self._loaded.get(placement.adapter_id)
        if adapter is None:
            raise InvalidRequest("The adapter is not loaded.")
        adapter.place(placement.slot)
        self._changed.discard(placement.slot)
        if adapter.by_operations:
            self._changed.add(placement.slot)

    def by_operations(self, batch: Batch) -> bool:
        """Return whether the adapter of any row has changes that captured graphs do not compute."""
        slots = batch.row_values.get(ADAPTER) if self._changed else None
        return slots is not None and not self._changed.isdisjoint(slots.tolist())

    def tokens_of_slots(self, batch: Batch, positions: Tensor | slice | None = None) -> Mapping[int, Tensor]:
        """Return the tokens of each slot whose adapter has changes that captured graphs do not compute.

        Tokens are indices into the batch, or into `positions` [n], which are themselves indices into the batch.
        """
        of_rows = batch.row_values[ADAPTER]
        slots = torch.from_numpy(np.repeat(of_rows, batch.counts)).to(self._device)
        slots = slots if positions is None else slots[positions]
        present = sorted(self._changed.intersection(of_rows.tolist()))
        return {slot: torch.nonzero(slots == slot)[:, 0] for slot in present}

    def close(self) -> None:
        """End the thread that reads files."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _load(self, adapter_id: int, folder: Path) -> bool:
        config = read_config(folder)
        if config.rank > self._max_rank:
            raise CheckpointError(f"{folder} has rank {config.rank}; the limit is {self._max_rank} (--max-lora-rank).")
        weights = read_weights(folder, config)
        check_copies(folder, weights.copies, self._facts)
        self._loaded[adapter_id] = self._slots.fit(folder, weights)
        return config.has_magnitudes
