"""The plan's section about several devices and processes."""

from __future__ import annotations

from ops.machine import Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ParallelPlan
from runtime.config.resolve.plan_builder import PlanBuilder

JOIN_TIMEOUT_S = 600.0


def parallel_plan(builder: PlanBuilder, machine: Machine, facts: ModelFacts, device: str) -> ParallelPlan:
    args = builder.args.parallel
    _check_heads(builder, facts)
    _check_stages(builder, facts)
    _check_devices(builder, machine, device)
    timeout = args.dist_timeout
    why = "as asked" if timeout is not None else "long enough to read a large model"
    return ParallelPlan(
        gpu_step=builder.take("parallel.gpu_step", "gpu_id_step"),
        nnodes=builder.take("parallel.nnodes", "nnodes"),
        node_rank=builder.take("parallel.node_rank", "node_rank"),
        meeting=_meeting(builder),
        store_port=builder.take("parallel.store_port", "nccl_port"),
        balance=builder.take("parallel.balance", "load_balance_method"),
        tp_size=builder.take("parallel.tp_size", "tp_size"),
        pp_size=builder.take("parallel.pp_size", "pp_size"),
        dp_size=builder.take("parallel.dp_size", "dp_size"),
        join_timeout_s=builder.decide("parallel.join_timeout_s", timeout or JOIN_TIMEOUT_S, why),
    )


def _meeting(builder: PlanBuilder) -> tuple[str, int] | None:
    args = builder.args.parallel
    place = "parallel.meeting"
    if args.nnodes == 1:
        for option in ("node_rank", "dist_init_addr", "nccl_port"):
            if value := builder.args.get(option):
                flag = "--" + option.replace("_", "-")
                builder.refuse(option, f"{flag} {value} is for several machines; say --nnodes too.")
        return builder.decide(place, None, "there is one machine")
    if args.node_rank >= args.nnodes:
        builder.refuse("node_rank", f"--node-rank {args.node_rank}: it must be below --nnodes {args.nnodes}.")
    if args.tp_size * args.pp_size % args.nnodes:
        builder.refuse(
            "nnodes",
            f"--nnodes {args.nnodes} must divide --tp-size {args.tp_size} x --pp-size {args.pp_size}.",
        )
    if args.dp_size > 1:
        builder.refuse(
            "dp_size", "--dp-size over several machines is not possible; start one server on each."
        )
    host, colon, port = (args.dist_init_addr or "").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        builder.refuse("dist_init_addr", "--nnodes needs --dist-init-addr HOST:PORT, of the first machine.")
        return None
    return builder.decide(place, (host.strip("[]"), int(port)), "as asked")


def _check_heads(builder: PlanBuilder, facts: ModelFacts) -> None:
    size = builder.args.parallel.tp_size
    if not facts.path or size == 1:  # nothing is known of the model yet, or nothing is cut
        return
    if facts.num_heads % size:
        builder.refuse(
            "tp_size", f"--tp-size {size}: the model's {facts.num_heads} query heads cannot be shared evenly."
        )
    elif facts.num_kv_heads % size and size % facts.num_kv_heads:
        builder.refuse(
            "tp_size",
            f"--tp-size {size}: the model's {facts.num_kv_heads} kv heads can be neither shared nor repeated "
            "evenly.",
        )


def _check_stages(builder: PlanBuilder, facts: ModelFacts) -> None:
    args = builder.args.parallel
    if facts.path and args.pp_size > facts.num_layers:
        builder.refuse(
            "pp_size", f"--pp-size {args.pp_size}: the model has only {facts.num_layers} layers to share."
        )
    if args.max_micro_batch_size is not None and args.pp_size == 1:
        builder.refuse("max_micro_batch_size", "--max-micro-batch-size needs a pipeline; say --pp-size too.")


def _check_devices(builder: PlanBuilder, machine: Machine, device: str) -> None:
    args = builder.args.parallel
    needed = args.tp_size * args.pp_size * args.dp_size // args.nnodes
    if not device.startswith("cuda"):
        for option in ("base_gpu_id", "gpu_id_step"):
            if option in builder.args.said:
                builder.refuse(option, f"--{option.replace('_', '-')} needs GPUs; the model runs on the CPU.")
        return
    if needed == 1:
        return
    first = int(device.partition(":")[2] or 0)
    if first + (needed - 1) * args.gpu_id_step >= len(machine.gpus):
        builder.refuse(
            "tp_size",
            f"--tp-size {args.tp_size} x --pp-size {args.pp_size} x --dp-size {args.dp_size} needs {needed} "
            f"GPUs from number {first} on; this machine has {len(machine.gpus)}.",
        )
