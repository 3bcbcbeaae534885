"""Records which experts are chosen for the tokens of steps (`--expert-distribution-recorder-mode`)."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.sampling.native import to_device
from runtime.batch import Batch
from runtime.config.plan import ExpertPlan
from runtime.errors import InvalidRequest
from runtime.experts.placement import Placement
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.moe import MoE

logger = logging.getLogger("penstock.core")

FOLDER_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"  # as in SGLang, so that its tools find the files
DEFAULT_FOLDER = "/tmp"
LOG_STEPS = 40  # number of steps between two log lines about the balance of the ranks
EPSILON = 1e-5


class Counts(NamedTuple):
    """The expert choices of one step, for L layers with X experts in P slots."""

    by_expert: Tensor  # number of tokens that chose each expert, int32 [L, X]
    by_slot: Tensor  # number of tokens by slot, int32 [L, P]
    utilization: Tensor  # float32 [], mean load of the ranks divided by the largest load, averaged over layers


@dataclass(slots=True)
class _Due:
    """The loads that `when_due` promised to an expert balancer."""

    num_steps: int
    every: int  # keep the loads of every n-th step too; 0: keep only the sum over all steps
    future: Future[Any]
    total: Tensor | None = None  # sum of `Counts.by_expert`
    kept: list[Tensor] = field(default_factory=list)  # `Counts.by_expert` of single steps
    utilizations: list[Tensor] = field(default_factory=list)


class ExpertRecorder:
    """Counts the expert choices in a rank's MoE layers. Must be called on the thread that enqueues steps.

    Ranks that share layers see the same choices, so only the first of these ranks records. On a GPU, recording does not
    wait for the device; only reading a record does.
    """

    def __init__(
        self, mixtures: Mapping[int, MoE], sharing: ExpertSharing, plan: ExpertPlan, rank: int, num_layers: int
    ) -> None:
        self._mixtures, self._sharing, self._rank, self._num_layers = mixtures, sharing, rank, num_layers
        self._mode, self._log = plan.record or "stat", plan.log_balance
        limit = None if plan.record_steps < 0 else plan.record_steps
        self._steps: deque[Counts] = deque(maxlen=limit)
        self._records: deque[dict[str, Any]] = deque(maxlen=limit)  # records of single steps, in the detailed modes
        self._num_experts = max(each.num_experts for each in mixtures.values())
        self._is_running = plan.log_balance
        self._number = 0  # number of steps since the start
        self._due: _Due | None = None  # the call of `when_due` that waits for its result
        # Current placements, and the expert of each slot [L, P].
        self._experts: tuple[list[Placement], Tensor] | None = None

    def start(self) -> None:
        """Discard the recorded steps, and start to record."""
        self._steps.clear()
        self._records.clear()
        self._is_running = True

    def stop(self) -> None:
        """Stop recording. `dump` still returns the recorded steps."""
        self._is_running = False

    def note(self, batch: Batch, count: int, captured: Mapping[int, Tensor] | None = None) -> None:
        """Record an enqueued step of `count` tokens.

        With data-parallel attention, `count` also counts the tokens of the other groups. `captured` has the buffers to
        which a graph writes the chosen experts, by layer.
        """
        if not self._is_running and self._due is None:
            return
        present = self._present(count, captured)
        if present is None or not count:
            return
        self._number += 1
        counts = self._count(present)
        if self._due is not None:
            self._settle(self._due, counts)
        if not self._is_running:
            return
        self._steps.append(counts)
        if self._mode == "per_pass":
            self._records.append(self._record(global_physical_count=self._padded(counts.by_slot.clone())))
        elif self._mode == "per_token":
            self._records.append(self._tokens(batch, present))
        if self._log and self._number % LOG_STEPS == 0:
            recent = list(self._steps)[-LOG_STEPS:]
            total = torch.stack([each.by_expert for each in recent]).sum(0).float()
            logger.info(
                "Expert balancedness of the last %d steps: ranks %.3f, experts %.3f.",
                len(recent),
                _mean_utilization(recent),
                ((total.mean(-1) + EPSILON) / (total.amax(-1) + EPSILON)).mean().item(),
            )

    def chosen(self, tokens: Tensor, count: int, captured: Mapping[int, Tensor] | None = None) -> Tensor:
        """Return the experts that were chosen for some tokens of an enqueued step, int16 [n, L, k], as a copy.

        `tokens` [n] are the indices of these tokens among the `count` tokens of the step. L is the number of all
        layers; layers without experts have zeros. Raises RuntimeError if the step did not record its choices.
        """
        present = self._present(count, captured)
        if present is None:
            raise RuntimeError("The step did not record the experts that its tokens have chosen.")
        [first, *_] = present.values()
        tokens = to_device(tokens, first.device)
        ids = torch.stack([each[tokens] for each in present.values()])  # [M, n, k]
        if self._sharing.has_copies:
            slots = self._experts_of_slots(first.device).to(torch.int32)
            ids = torch.stack([of_layer[each.long()] for of_layer, each in zip(slots, ids, strict=True)])
        return self._padded(ids.to(torch.int16)).transpose(0, 1).contiguous()

    def _present(self, count: int, captured: Mapping[int, Tensor] | None) -> dict[int, Tensor] | None:
        """Return the experts chosen in the last step by layer, int32 [count, k], or None if a layer recorded none."""
        present = {}
        for layer, mixture in self._mixtures.items():
            found = mixture.recorded(count) if captured is None else captured.get(layer)
            if found is None:
                return None
            present[layer] = found[:count]
        return present

    def dump(self) -> Future[dict[str, Any]] | None:
        """Write the record to a file on a thread, and discard it here.

        Returns a future of the summary: path, number of steps, utilization, and sums by layer. Returns None if no step
        was recorded.
        """
        steps, records = list(self._steps), list(self._records)
        self._steps.clear()
        self._records.clear()
        if not steps:
            return None
        total = torch.stack([each.by_expert for each in steps]).sum(0)
        answer = {
            "num_steps": len(steps),
            "average_utilization_rate": _mean_utilization(steps),
            "logical_count": dict(zip(map(str, self._mixtures), total.tolist(), strict=True)),
        }
        body = self._body(steps, records, answer["average_utilization_rate"])
        done: Future[dict[str, Any]] = Future()

        def write() -> None:
            try:
                folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
                path = folder / f"expert_distribution_recorder_{time.time()}_{self._rank}.pt"
                folder.mkdir(parents=True, exist_ok=True)
                # A record reveals tokens of prompts, so other users of this machine must not be able to read it.
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(opened, "wb") as file:
                    torch.save(body, file)
                done.set_result({**answer, "path": str(path)})
            except OSError as error:
                done.set_exception(InvalidRequest(f"The record cannot be written: {error.strerror}."))
            except BaseException as error:
                done.set_exception(error)

        Thread(target=write, name="expert record", daemon=True).start()
        return done

    def when_due(self, num_steps: int, max_kept: int = 0) -> Future[Any]:
        """Return a future of the loads in the next `num_steps` steps: {"loads": [X] by layer, "utilization"}.

        If `max_kept` is not 0, "loads" has [S, X] by layer instead, the loads of at most `max_kept` single steps at
        equal distances.
        """
        self._due = _Due(num_steps, -(-num_steps // max_kept) if max_kept else 0, Future())
        return self._due.future

    def close(self) -> None:
        """If a future that `when_due` returned has no result yet, set its result to None."""
        if self._due is not None:
            self._due.future.set_result(None)
            self._due = None

    def _settle(self, due: _Due, counts: Counts) -> None:
        if not due.every:
            due.total = counts.by_expert.clone() if due.total is None else due.total.add_(counts.by_expert)
        elif len(due.utilizations) % due.every == 0:
            due.kept.append(counts.by_expert)
        due.utilizations.append(counts.utilization)
        if len(due.utilizations) < due.num_steps:
            return
        total = torch.stack(due.kept, 1) if due.total is None else due.total
        loads = dict(zip(map(str, self._mixtures), total.tolist(), strict=True))
        self._due = None
        due.future.set_result({"loads": loads, "utilization": _mean(due.utilizations)})

    def _experts_of_slots(self, device: torch.device) -> Tensor:
        """Return the expert in each slot, [L, P]. It is copied to the device only after experts have moved."""
        places = [self._sharing.placement(layer, mixture.num_experts) for layer, mixture in self._mixtures.items()]
        if self._experts is None or self._experts[0] != places:
            self._experts = places, torch.tensor([each.experts for each in places], device=device)
        return self._experts[1]

    def _count(self, chosen: Mapping[int, Tensor]) -> Counts:
        sharing = self._sharing
        ids = torch.stack([each.reshape(-1) for each in chosen.values()]).long()  # [L, T * k]
        experts = self._experts_of_slots(ids.device)  # [L, P]
        ones = torch.ones_like(ids, dtype=torch.int32)
        if sharing.has_copies:
            by_slot = torch.zeros(experts.shape, dtype=torch.int32, device=ids.device).scatter_add_(1, ids, ones)
            by_expert = by_slot.new_zeros(len(ids), self._num_experts).scatter_add_(1, experts, by_slot)
        else:
            by_expert = torch.zeros(len(ids), self._num_experts, dtype=torch.int32, device=ids.device)
            by_expert.scatter_add_(1, ids, ones)
            by_slot = by_expert.gather(1, experts)
        of_ranks = by_slot.view(len(ids), sharing.axis.size, -1).sum(-1).float()
        utilization = ((of_ranks.mean(-1) + EPSILON) / (of_ranks.amax(-1) + EPSILON)).mean()
        return Counts(by_expert, by_slot, utilization)

    def _record(self, **values: Any) -> dict[str, Any]:
        return {"forward_pass_id": self._number, "rank": self._rank, "gatherer_key": "primary", **values}

    def _tokens(self, batch: Batch, chosen: Mapping[int, Tensor]) -> dict[str, Any]:
        ids = torch.from_numpy(batch.token_ids.copy())
        positions = torch.cat(
            [
                torch.arange(start, start + count)
                for start, count in zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)
            ]
        )
        topk = self._padded(torch.stack(list(chosen.values())).clone())
        return self._record(topk_ids_of_layer=topk, input_ids=ids, positions=positions)

    def _padded(self, of_mixtures: Tensor) -> Tensor:
        """Return values for all layers of the model, as SGLang writes them: layers without experts have 0."""
        values = of_mixtures.new_zeros(self._num_layers, *of_mixtures.shape[1:])
        values[list(self._mixtures)] = of_mixtures
        return values

    def _body(self, steps: list[Counts], records: list[dict[str, Any]], utilization: float) -> dict[str, Any]:
        if self._mode in ("per_pass", "per_token"):
            slots = self._experts_of_slots(torch.device("cpu")).cpu()
            for record in records:
                record.update({name: value.cpu() for name, value in record.items() if isinstance(value, Tensor)})
            return {"records": records, "last_physical_to_logical_map": self._padded(slots)}
        counts = torch.stack([self._padded(each.by_expert.cpu()) for each in steps])
        return {
            "rank": self._rank,
            "logical_count": counts,
            "average_utilization_rate_over_window": utilization,
        }


def _mean_utilization(steps: list[Counts]) -> float:
    return _mean([each.utilization for each in steps])


def _mean(values: list[Tensor]) -> float:
    return round(torch.stack(values).mean().item(), 6)
