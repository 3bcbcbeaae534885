"""The parallel section of the plan: devices, processes and machines."""

from __future__ import annotations

from collections.abc import Mapping

from ops.machine import Machine
from runtime.config.args import Args
from runtime.config.model_facts import ModelFacts
from runtime.config.options.parallel import ParallelArgs
from runtime.config.plan import ParallelPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder
from runtime.errors import ConfigurationError

JOIN_TIMEOUT_S = 600.0
ACROSS_MACHINES = ("node_rank", "dist_init_addr", "nccl_port")
ONE_MACHINE = "on a single machine the ranks find each other through a file"
TORCHRUN = "TORCHELASTIC_RUN_ID"  # environment variable of processes that torchrun starts


def parallel_plan(builder: PlanBuilder, machine: Machine, facts: ModelFacts, device: str, dtype: str) -> ParallelPlan:
    """Plan the ranks. Refuse sizes that do not fit the model's heads and layers or the machine's devices."""
    args = builder.args.parallel
    _check_groups(builder, facts)
    _check_heads(builder, facts)
    _check_stages(builder, facts)
    _check_devices(builder, machine, device)
    _check_numa(builder, machine)
    timeout = args.dist_timeout
    return builder.build(
        ParallelPlan,
        master_address=_master_address(builder),
        store_port=builder.follow("nccl_port") if args.nnodes > 1 else Decision(None, ONE_MACHINE),
        whole_dense=_whole_dense(builder),
        two_batches=_two_batches(builder, facts),
        symmetric_memory=_symmetric_memory(builder, device, dtype),
        join_timeout_s=Decision(JOIN_TIMEOUT_S, "long enough to read a large model")
        if timeout is None
        else Decision(float(timeout), "as asked"),
    )


def _master_address(builder: PlanBuilder) -> Decision[tuple[str, int] | None]:
    args = builder.args.parallel
    if args.nnodes == 1:
        # With an explicit `--nnodes 1`, a script may set the address and the port too. If --nnodes is missing, the user
        # probably forgot it.
        idle = ("node_rank",) if "nnodes" in builder.args.explicitly_set else ACROSS_MACHINES
        for option in idle:
            if builder.args.changed(option):
                flag, value = "--" + option.replace("_", "-"), builder.args.get(option)
                builder.refuse(option, f"{flag} {value} needs several machines; set --nnodes too.")
        return Decision(None, ONE_MACHINE)
    if args.node_rank >= args.nnodes:
        builder.refuse("node_rank", f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}.")
    if args.tp_size * args.pp_size % args.nnodes:
        builder.refuse(
            "nnodes",
            f"--nnodes {args.nnodes} must divide --tp-size {args.tp_size} x --pp-size {args.pp_size}.",
        )
    if args.dp_size > 1 and not args.enable_dp_attention:
        builder.refuse("dp_size", "--dp-size over several machines is not supported; start one server per machine.")
    host, colon, port = (args.dist_init_addr or "").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        builder.refuse("dist_init_addr", "--nnodes needs --dist-init-addr HOST:PORT, the address of the first machine.")
        return Decision(None, "the requested value cannot be used")
    return Decision((host.strip("[]"), int(port)), "as asked")


def _whole_dense(builder: PlanBuilder) -> Decision[bool]:
    size, tp_size = builder.args.moe.moe_dense_tp_size, builder.args.parallel.tp_size
    if size is None:
        return Decision(False, "the default")
    if size not in (1, tp_size):
        builder.refuse(
            "moe_dense_tp_size",
            f"--moe-dense-tp-size {size} is not supported; use 1, or {tp_size}, the value of --tp-size.",
        )
    return Decision(size == 1 < tp_size, "as asked")


def _two_batches(builder: PlanBuilder, facts: ModelFacts) -> Decision[float | None]:
    args, flag = builder.args.parallel, "--enable-two-batch-overlap"
    if not args.enable_two_batch_overlap:
        if builder.args.changed("tbo_token_distribution_threshold"):
            builder.refuse("tbo_token_distribution_threshold", f"--tbo-token-distribution-threshold needs {flag}.")
        return Decision(None, "the default")
    moe, algorithm = builder.args.moe, builder.args.speculative.speculative_algorithm
    problems = {
        "needs several ranks that share every layer; set --tp-size to at least 2": args.tp_size == 1,
        "cannot be combined with a pipeline; use --tp-size and not --pp-size": args.pp_size > 1,
        "cannot be combined with --enable-dp-attention, whose groups would be split differently": (
            args.enable_dp_attention
        ),
        "cannot be combined with records of experts, which are made per step": (
            moe.enable_eplb
            or moe.enable_expert_distribution_metrics
            or moe.expert_distribution_recorder_mode is not None
            or builder.args.sampling.enable_return_routed_experts
        ),
        "cannot be combined with a compiled forward (--enable-torch-compile)": builder.args.graphs.enable_torch_compile,
        "supports drafts of NGRAM only": algorithm not in (None, "NGRAM"),
        "does not support embedding models": facts.pooling is not None,
    }
    for problem, is_there in problems.items():
        if is_there:
            builder.refuse("enable_two_batch_overlap", f"{flag} {problem}.")
    return Decision(args.tbo_token_distribution_threshold, "as asked")


def _symmetric_memory(builder: PlanBuilder, device: str, dtype: str) -> Decision[bool]:
    args, flag = builder.args.parallel, "--enable-symm-mem"
    if not args.enable_symm_mem:
        return Decision(False, "the default: NCCL sums")
    problems = {
        "needs NVIDIA GPUs, and the model runs on the CPU": not device.startswith("cuda"),
        "needs several GPUs that share every layer (--tp-size)": args.tp_size == 1,
        "needs GPUs of one machine; leave it out with --nnodes": args.nnodes > 1,
        "supports one copy of the model; leave it out with --dp-size, or set --enable-dp-attention": (
            args.dp_size > 1 and not args.enable_dp_attention
        ),
        "sums bfloat16 and float32, and the model computes in float16; use --dtype bfloat16": dtype == "float16",
        "cannot be combined with --enable-two-batch-overlap, whose sums run beside the other half": (
            args.enable_two_batch_overlap
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            builder.refuse("enable_symm_mem", f"{flag} {problem}.")
    return Decision(True, "as asked")


def _check_groups(builder: PlanBuilder, facts: ModelFacts) -> None:
    """Refuse attention groups that do not fit the ranks or other options."""
    args, option = builder.args.parallel, "enable_dp_attention"
    flag = "--enable-dp-attention"
    if not args.enable_dp_attention:
        if args.enable_dp_lm_head:
            builder.refuse("enable_dp_lm_head", f"--enable-dp-lm-head needs {flag}.")
        return
    if args.dp_size < 2 or args.tp_size % args.dp_size:
        builder.refuse(
            option,
            f"{flag} divides the --tp-size {args.tp_size} ranks into --dp-size {args.dp_size} groups; --dp-size must "
            "be at least 2 and divide --tp-size.",
        )
    unsupported = {
        "a pipeline (--pp-size)": args.pp_size > 1,
        "adapters (--enable-lora, --lora-paths)": builder.args.lora.enable_lora or bool(builder.args.lora.lora_paths),
        "embedding models that need the whole text in one step": facts.needs_whole_prompts,
        "encoders": facts.is_encoder,
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            builder.refuse(option, f"{flag} does not support {name} yet; use --dp-size without {flag}.")


def _check_heads(builder: PlanBuilder, facts: ModelFacts) -> None:
    args = builder.args.parallel
    size = args.tp_size // args.dp_size if args.enable_dp_attention else args.tp_size
    if facts.is_encoder and args.tp_size > 1:
        size = args.tp_size
    if not facts.path or size == 1:  # the model is unknown, or nothing is divided
        return
    if facts.is_encoder:
        builder.refuse("tp_size", f"--tp-size {size}: encoders run on one device; use --dp-size.")
    elif facts.num_heads % size:
        builder.refuse("tp_size", f"--tp-size {size} does not divide the model's {facts.num_heads} query heads.")
    elif facts.num_kv_heads % size and size % facts.num_kv_heads:
        builder.refuse(
            "tp_size",
            f"--tp-size {size}: the model's {facts.num_kv_heads} KV heads can be neither divided nor repeated evenly.",
        )


def _check_stages(builder: PlanBuilder, facts: ModelFacts) -> None:
    args = builder.args.parallel
    if args.pp_size > 1 and facts.needs_whole_prompts:
        builder.refuse("pp_size", f"--pp-size {args.pp_size}: this embedding model runs on one device.")
    elif facts.path and args.pp_size > facts.num_layers:
        builder.refuse("pp_size", f"--pp-size {args.pp_size}: the model has only {facts.num_layers} layers.")
    if args.max_micro_batch_size is not None and args.pp_size == 1:
        builder.refuse("max_micro_batch_size", "--max-micro-batch-size needs a pipeline; set --pp-size too.")


def _check_devices(builder: PlanBuilder, machine: Machine, device: str) -> None:
    args = builder.args.parallel
    copies = 1 if args.enable_dp_attention else args.dp_size
    needed = args.tp_size * args.pp_size * copies // args.nnodes
    if not device.startswith("cuda"):
        for option in ("base_gpu_id", "gpu_id_step"):
            if builder.args.changed(option):
                builder.refuse(option, f"--{option.replace('_', '-')} needs GPUs; the model runs on the CPU.")
        return
    if needed == 1:
        return
    first = int(device.partition(":")[2] or 0)
    if first + (needed - 1) * args.gpu_id_step >= len(machine.gpus):
        # With --enable-dp-attention, the groups of --dp-size share the GPUs of --tp-size.
        factor = "" if args.enable_dp_attention else f" x --dp-size {copies}"
        builder.refuse(
            "tp_size",
            f"--tp-size {args.tp_size} x --pp-size {args.pp_size}{factor} needs {needed} "
            f"GPUs, starting at index {first}; this machine has {len(machine.gpus)}.",
        )


def _check_numa(builder: PlanBuilder, machine: Machine) -> None:
    """Refuse NUMA nodes that this machine lacks, and a list whose length is not the number of ranks."""
    args, nodes = builder.args.parallel, builder.args.parallel.numa_node
    if nodes is None:
        return
    num_here = max(1, args.tp_size * args.pp_size // args.nnodes)
    problems = {
        "needs Linux, which lists the nodes in /sys/devices/system/node": not machine.numa_nodes,
        f"this machine has the nodes {', '.join(map(str, sorted(machine.numa_nodes)))}": (
            not machine.numa_nodes.issuperset(nodes)
        ),
        f"needs one node for each of the {num_here} ranks on this machine": len(nodes) != num_here,
        "cannot bind the replicas of --dp-size, which share a process; start one server per node": (
            args.dp_size > 1 and not args.enable_dp_attention
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            builder.refuse("numa_node", f"--numa-node {' '.join(map(str, nodes))}: {problem}.")
            return


def with_torchrun(args: Args, environment: Mapping[str, str]) -> Args:
    """Set --nnodes, --node-rank and --dist-init-addr from torchrun's environment, unless they are set.

    torchrun listens on MASTER_PORT, so Penstock uses the next port. Raises `ConfigurationError` if torchrun started
    several processes on a machine, because Penstock starts the ranks of a machine itself.
    """
    if TORCHRUN not in environment:
        return args
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            "Give torchrun --nproc-per-node 1: Penstock starts the other processes of a machine itself."
        )
    nnodes = int(environment.get("WORLD_SIZE", "1"))
    if nnodes == 1:
        return args
    found = {
        "nnodes": nnodes,
        "node_rank": int(environment["RANK"]),
        "dist_init_addr": f"{environment['MASTER_ADDR']}:{int(environment['MASTER_PORT']) + 1}",
    }
    return Args.of(**{**found, **args.keywords()})


def ranks_here(args: ParallelArgs) -> int:
    """Return the number of ranks on this machine, summed over all replicas of the model."""
    copies = 1 if args.enable_dp_attention else args.dp_size
    return -(-args.tp_size * args.pp_size * copies // args.nnodes)
