"""A rank from its setup to its steps: the same for the engine's process and for workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ops.cpp.build import BuildError
from ops.machine import Machine
from ops.select import Kernels, select
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan, Plan
from runtime.distributed.mesh import Mesh, Place
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.sizing import StepMemory
from runtime.models.decoder import Decoder
from runtime.models.loader import load_model
from runtime.worker.compiled import compilable
from runtime.worker.device import open_device
from runtime.worker.memory_profile import DryRun

logger = logging.getLogger("penstock.core")


class Member:
    """One rank: its share of the weights at once, its groups and its share of the KV pool after `join`."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        model: ModelPlan = setup["model"]
        self.plan = model
        self.facts: ModelFacts = setup["facts"]
        self.device = torch.device(model.device)
        self.mesh = Mesh(Place(**setup["place"]), self.device)
        kernels = _select(**setup["kernels"])
        self.kernels = compilable(kernels) if setup["compiled"] else kernels
        decoder = load_model(
            self.facts,
            model,
            self.kernels,
            self.mesh,
            self.mesh.place.share(self.facts.num_layers),
        )
        self._weight_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
        self._model: Decoder | None = decoder

    def take_model(self) -> Decoder:
        """The model, once: whoever takes it decides when its weights are freed."""
        model, self._model = self._model, None
        if model is None:
            raise RuntimeError("The model of this rank was taken already.")
        return model

    def measure(self, plan: Plan) -> StepMemory:
        """What the largest steps take, by running them. Blocks for seconds; for a rank that computes alone."""
        if self._model is None:
            raise RuntimeError("Steps are measured before the model is taken.")
        device = open_device(self.device)
        steps = DryRun(self._model, self.kernels, plan, self.facts, device).measure()
        device.release_unused()  # or it would look as if somebody had it
        return steps

    def memory(self) -> dict[str, int]:
        """What the size of the KV pool depends on, in bytes."""
        if self.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(self.device)
        else:
            machine = Machine.probe()
            available, total = machine.available_bytes, machine.total_bytes
        return {"available": available, "total": total, "weights": self._weight_bytes}

    def join(self, join: Mapping[str, Any]) -> KVPool:
        """Meet the other ranks and make the pool. Blocks until all are there."""
        if self.mesh.place.world_size > 1:
            self.mesh.join(self._store(join), timeout_s=join["timeout_s"], address=join["address"])
        local = self.mesh.place.local(self.facts)
        return KVPool(
            local.num_layers,
            join["num_pages"],
            join["page_size"],
            local.num_kv_heads,
            local.head_dim,
            getattr(torch, join["kv_dtype"]),
            self.device,
            first_layer=self.mesh.place.share(self.facts.num_layers).layers.start,
        )

    def _store(self, join: Mapping[str, Any]) -> Any:
        """Where the ranks find each other: a private file, or over the network a port of rank 0's machine."""
        world_size, place = self.mesh.place.world_size, join["store"]
        if isinstance(place, str):
            return distributed.FileStore(place, world_size)  # pyright: ignore[reportPrivateImportUsage]
        listening = join.get("listening", -1)  # rank 0's socket, bound to the one address that was asked for
        store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            place["host"],
            place["port"],
            world_size,
            listening >= 0,
            timedelta(seconds=join["timeout_s"]),
            wait_for_workers=False,
            **({"master_listen_fd": listening} if listening >= 0 else {}),
        )
        return distributed.PrefixStore(place["name"], store)  # pyright: ignore[reportPrivateImportUsage]


def _select(
    choices: Mapping[str, str], settings: Mapping[str, Any], fallback: Mapping[str, str] | None
) -> Kernels:
    """The chosen kernels, or the second choice where those in C++ cannot be compiled."""
    try:
        return select(choices, settings)
    except BuildError as error:
        if fallback is None:
            raise
        logger.warning("The kernels in C++ cannot be used, torch's are slower: %s", error)
        return select(fallback, settings)
