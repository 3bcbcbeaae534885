"""Balances the load of expert-parallel ranks (`--enable-eplb`): busy experts move to other ranks every few steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio.to_thread
import numpy as np

from runtime.batch import Runner
from runtime.config.plan import ExpertPlan
from runtime.experts.balance import balanced

logger = logging.getLogger("penstock.core")

MAX_KEPT = 16  # maximum number of single steps whose loads the "vec" algorithms balance


class ExpertBalancer:
    """Moves the experts of one replica while it serves. Belongs to the scheduler actor, which calls `run`.

    Every rank counts how often each expert is chosen. A thread computes the new placement. The experts are then moved a
    few layers at a time, between two steps.
    """

    def __init__(self, plan: ExpertPlan, runner: Runner, *, num_nodes: int, num_groups: int) -> None:
        self._plan, self._runner = plan, runner
        self._num_nodes, self._num_groups = num_nodes, num_groups
        self.num_rebalances = 0
        self.num_moved = 0  # number of experts that were copied to another rank

    async def run(self) -> None:
        """Repeat until cancelled: count the expert choices of some steps, then move experts."""
        by_step = self._plan.balance_algorithm.startswith("deepseek_vec")
        asked = {"num_steps": self._plan.balance_steps, "max_kept": MAX_KEPT if by_step else 0}
        while True:
            answers = await self._call("await_expert_loads", asked)
            stages = [answer for answer in answers if answer is not None]
            if not stages:
                return  # the engine is closing
            await self._rebalance(stages)

    async def _rebalance(self, stages: list[dict[str, Any]]) -> None:
        plan, began = self._plan, time.monotonic()
        utilization = sum(stage["utilization"] for stage in stages) / len(stages)
        if utilization > plan.balance_threshold:
            logger.info("Experts stay where they are: the ranks' utilization is %.3f.", utilization)
            return
        loads: dict[int, Any] = {int(layer): each for stage in stages for layer, each in stage["loads"].items()}
        slots = await anyio.to_thread.run_sync(partial(self._balanced, loads))
        layers, moved = sorted(slots), 0
        size = plan.balance_layers or len(layers)
        for first in range(0, len(layers), size):
            chunk = layers[first : first + size]
            lines = np.array([slots[layer] for layer in chunk], np.int32)
            answers = await self._call("place_experts", {"layers": chunk, "slots": lines.reshape(-1)})
            if any(answer["moved"] is None for answer in answers):
                logger.info("Experts stay where they are: the weights are being updated.")
                break
            moved += sum(answer["moved"] for answer in answers)
        self.num_rebalances, self.num_moved = self.num_rebalances + 1, self.num_moved + moved
        seconds = time.monotonic() - began
        logger.info("Experts were rebalanced: %d moved in %.2f s. Utilization: %.3f.", moved, seconds, utilization)

    def _balanced(self, loads: Mapping[int, Any]) -> dict[int, list[int]]:
        plan = self._plan
        return balanced(
            loads,
            num_slots=np.shape(next(iter(loads.values())))[-1] + plan.num_redundant,
            num_ranks=plan.ep_size,
            num_nodes=self._num_nodes,
            num_groups=self._num_groups,
            algorithm=plan.balance_algorithm,
        )

    async def _call(self, verb: str, payload: Mapping[str, Any]) -> list[Any]:
        return await asyncio.shield(self._runner.call(verb, payload))
