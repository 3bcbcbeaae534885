"""The plan's section about several devices and processes."""

from __future__ import annotations

from ops.machine import Machine
from runtime.facts import ModelFacts
from runtime.plan import ParallelPlan
from runtime.resolve.ledger import Ledger

JOIN_TIMEOUT_S = 600.0


def parallel_plan(ledger: Ledger, machine: Machine, facts: ModelFacts, device: str) -> ParallelPlan:
    args = ledger.args.parallel
    _check_heads(ledger, facts)
    _check_stages(ledger, facts)
    _check_devices(ledger, machine, device)
    timeout = args.dist_timeout
    why = "as asked" if timeout is not None else "long enough to read a large model"
    return ParallelPlan(
        balance=ledger.take("parallel.balance", "load_balance_method"),
        tp_size=ledger.take("parallel.tp_size", "tp_size"),
        pp_size=ledger.take("parallel.pp_size", "pp_size"),
        dp_size=ledger.take("parallel.dp_size", "dp_size"),
        join_timeout_s=ledger.decide("parallel.join_timeout_s", timeout or JOIN_TIMEOUT_S, why),
    )


def _check_heads(ledger: Ledger, facts: ModelFacts) -> None:
    size = ledger.args.parallel.tp_size
    if not facts.path or size == 1:  # nothing is known of the model yet, or nothing is cut
        return
    if facts.num_heads % size:
        ledger.refuse(
            "tp_size", f"--tp-size {size}: the model's {facts.num_heads} query heads cannot be shared evenly."
        )
    elif facts.num_kv_heads % size and size % facts.num_kv_heads:
        ledger.refuse(
            "tp_size",
            f"--tp-size {size}: the model's {facts.num_kv_heads} kv heads can be neither shared nor repeated "
            "evenly.",
        )


def _check_stages(ledger: Ledger, facts: ModelFacts) -> None:
    args = ledger.args.parallel
    if facts.path and args.pp_size > facts.num_layers:
        ledger.refuse(
            "pp_size", f"--pp-size {args.pp_size}: the model has only {facts.num_layers} layers to share."
        )
    if args.max_micro_batch_size is not None and args.pp_size == 1:
        ledger.refuse("max_micro_batch_size", "--max-micro-batch-size needs a pipeline; say --pp-size too.")


def _check_devices(ledger: Ledger, machine: Machine, device: str) -> None:
    args = ledger.args.parallel
    needed = args.tp_size * args.pp_size * args.dp_size
    if not device.startswith("cuda") or needed == 1:
        return
    first = int(device.partition(":")[2] or 0)
    if first + needed > len(machine.gpus):
        ledger.refuse(
            "tp_size",
            f"--tp-size {args.tp_size} x --pp-size {args.pp_size} x --dp-size {args.dp_size} needs {needed} "
            f"GPUs from number {first} on; this machine has {len(machine.gpus)}.",
        )
