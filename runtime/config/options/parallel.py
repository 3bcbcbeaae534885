"""Options about several devices, processes, machines and servers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import always, inert, option, planned
from runtime.config.plan import ModelPlan, ParallelPlan, SchedulerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs:
    """Several devices."""

    tp_size: int = option(
        1,
        "Tensor parallelism: number of devices (on a CPU: processes) that share every layer.",
        aliases=("--tensor-parallel-size",),
        low=1,
        plan=ParallelPlan.tp_size,
    )
    pp_size: int = option(
        1,
        "Pipeline parallelism: number of stages, each with a share of the layers.",
        aliases=("--pipeline-parallel-size",),
        low=1,
        plan=ParallelPlan.pp_size,
    )
    dp_size: int = option(
        1,
        "Data parallelism: number of copies of the model that share the requests.",
        aliases=("--data-parallel-size",),
        low=1,
        plan=ParallelPlan.dp_size,
    )
    max_micro_batch_size: int | None = option(
        None,
        "Most sequences in one micro-batch of a pipeline. Default: the running ones are divided evenly among "
        "the stages.",
        low=1,
        plan=SchedulerPlan.max_micro_batch,
    )
    nnodes: int = option(
        1, "Number of machines that serve the model together.", low=1, plan=ParallelPlan.nnodes
    )
    node_rank: int = option(
        0,
        "Number of this machine among them, from 0. The first one has the server; the others run workers for "
        "it and end with it.",
        low=0,
        plan=ParallelPlan.node_rank,
    )
    dist_init_addr: str | None = option(
        None,
        "host:port of the first machine, at which the others report.",
        aliases=("--nccl-init-addr",),
        plan=ParallelPlan.master_address,
    )
    dist_timeout: int | None = option(
        None,
        "Seconds to wait for the other processes at the start. Default: 600.",
        low=1,
        plan=ParallelPlan.join_timeout_s,
    )
    nccl_port: int | None = option(
        None,
        "With several machines: port of the first one at which the ranks meet. Default: any free one. On one "
        "machine the ranks meet in a file.",
        low=1,
        high=65535,
        plan=ParallelPlan.store_port,
    )
    base_gpu_id: int = option(
        0, "Number of the first GPU to use; the same as --device cuda:N.", low=0, plan=ModelPlan.device
    )
    gpu_id_step: int = option(
        1, "Distance between the numbers of the GPUs to use.", low=1, plan=ParallelPlan.gpu_step
    )
    load_balance_method: str = option(
        "round_robin",
        "How requests are spread over the copies of the model. round_robin: in turn; shortest_queue: to the "
        "copy with fewest requests; minimum_tokens: to the one whose requests have fewest tokens; "
        "longest_prefix: to the one that has most of the prompt in its cache, unless it is much busier.",
        choices=("round_robin", "shortest_queue", "minimum_tokens", "longest_prefix"),
        plan=ParallelPlan.balance,
    )
    load_watch_interval: float = inert(
        0.1,
        "Seconds between two looks at the load of the copies.",
        reason="all copies are scheduled in one process and their load is always known",
        above=0,
    )
    prefill_round_robin_balance: bool = planned(
        False, "With separate prefill servers: promise that they spread requests in turn."
    )
    enable_dp_attention: bool = planned(
        False, "Share the requests in attention and the experts in the other layers."
    )
    enable_dp_lm_head: bool = planned(
        False, "With data-parallel attention: split the output layer inside each attention group."
    )
    enable_two_batch_overlap: bool = planned(
        False, "Split a batch in two, so that one half communicates while the other computes."
    )
    tbo_token_distribution_threshold: float = planned(
        0.48, "Imbalance of the two halves from which one sequence may be cut between them.", low=0
    )
    disable_custom_all_reduce: bool = always(
        False,
        "Sum over devices with NCCL instead of a kernel of our own.",
        reason="there is no kernel of our own",
        sglang="off: a kernel of its own sums small tensors",
    )
    enable_nccl_nvls: bool = always(
        False,
        "Let NCCL sum inside the NVLink switch.",
        reason="NCCL does so wherever the switch can; NCCL_NVLS_ENABLE=0 in the environment turns it off",
    )
    enable_symm_mem: bool = planned(False, "Use NCCL's symmetric memory for sums over devices.")
    enable_mscclpp: bool = planned(False, "Use MSCCL++ for small sums over devices.")
    enable_p2p_check: bool = inert(
        False,
        "Test whether GPUs can reach each other's memory instead of assuming it.",
        reason="it is for a kernel of one's own that sums over GPUs, and there is none; NCCL tests for itself",
    )
    numa_node: tuple[int, ...] | None = planned(
        None, "NUMA node to which each worker process is bound.", low=0
    )
    enable_pdmux: bool = planned(
        False, "Run prompts and output tokens at the same time on separate parts of one GPU."
    )
    sm_group_num: int = inert(
        3,
        "Number of parts of the GPU for --enable-pdmux.",
        reason="nothing reads it where it comes from either",
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationArgs:
    """Separate prefill and decode servers."""

    disaggregation_mode: str = planned(
        "null",
        "Part of this server: everything (null), prompts only (prefill) or output only (decode).",
        choices=("null", "prefill", "decode"),
    )
    disaggregation_transfer_backend: str = planned(
        "mooncake",
        "What carries the KV cache from one server to the other; fake carries nothing, for tests.",
        choices=("mooncake", "nixl", "ascend", "fake"),
    )
    disaggregation_bootstrap_port: int = planned(
        8998, "Port at which a prefill server can be found by decode servers.", low=1, high=65535
    )
    disaggregation_decode_tp: int | None = planned(
        None, "Tensor parallelism of the decode servers. Default: that of this server.", low=1
    )
    disaggregation_decode_dp: int | None = planned(
        None, "Data parallelism of the decode servers. Default: that of this server.", low=1
    )
    disaggregation_prefill_pp: int = planned(1, "Pipeline parallelism of the prefill servers.", low=1)
    disaggregation_ib_device: str | None = planned(
        None, "InfiniBand devices that carry the KV cache, separated by commas."
    )
    disaggregation_decode_polling_interval: int = planned(
        1, "Steps between two looks at arriving KV caches on a decode server.", low=1
    )
    num_reserved_decode_tokens: int = planned(
        512, "Tokens that a decode server keeps free for every running request.", low=0
    )
