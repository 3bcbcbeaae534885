"""Options about several devices, processes and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, inert, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs:
    """Several devices."""

    tp_size: Annotated[
        int,
        OptionSpec(
            "Tensor parallelism: number of devices (on a CPU: processes) that share every layer.",
            aliases=("--tensor-parallel-size",),
            low=1,
            plan="parallel.tp_size",
        ),
    ] = 1
    pp_size: Annotated[
        int,
        OptionSpec(
            "Pipeline parallelism: number of stages, each with a share of the layers.",
            aliases=("--pipeline-parallel-size",),
            low=1,
            plan="parallel.pp_size",
        ),
    ] = 1
    dp_size: Annotated[
        int,
        OptionSpec(
            "Data parallelism: number of copies of the model that share the requests.",
            aliases=("--data-parallel-size",),
            low=1,
            plan="parallel.dp_size",
        ),
    ] = 1
    max_micro_batch_size: Annotated[
        int | None,
        OptionSpec(
            "Most sequences in one micro-batch of a pipeline. Default: the running ones are divided evenly "
            "among the stages.",
            low=1,
            plan="schedule.max_micro_batch",
        ),
    ] = None
    nnodes: Annotated[
        int, OptionSpec("Number of machines that serve the model together.", low=1, plan="parallel.nnodes")
    ] = 1
    node_rank: Annotated[
        int,
        OptionSpec(
            "Number of this machine among them, from 0. The first one has the server; the others run workers "
            "for it and end with it.",
            low=0,
            plan="parallel.node_rank",
        ),
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        OptionSpec(
            "host:port of the first machine, at which the others report.",
            aliases=("--nccl-init-addr",),
            plan="parallel.meeting",
        ),
    ] = None
    dist_timeout: Annotated[
        int | None,
        OptionSpec(
            "Seconds to wait for the other processes at the start. Default: 600.",
            low=1,
            plan="parallel.join_timeout_s",
        ),
    ] = None
    nccl_port: Annotated[
        int | None,
        OptionSpec(
            "With several machines: port of the first one at which the ranks meet. Default: any free one. On "
            "one machine the ranks meet in a file.",
            low=1,
            high=65535,
            plan="parallel.store_port",
        ),
    ] = None
    base_gpu_id: Annotated[
        int,
        OptionSpec(
            "Number of the first GPU to use; the same as --device cuda:N.", low=0, plan="model.device"
        ),
    ] = 0
    gpu_id_step: Annotated[
        int,
        OptionSpec("Distance between the numbers of the GPUs to use.", low=1, plan="parallel.gpu_step"),
    ] = 1
    load_balance_method: Annotated[
        str,
        OptionSpec(
            "How requests are spread over the copies of the model. round_robin: in turn; shortest_queue: to "
            "the copy with fewest requests; minimum_tokens: to the one whose requests have fewest tokens; "
            "longest_prefix: to the one that has most of the prompt in its cache, unless it is much busier.",
            choices=("round_robin", "shortest_queue", "minimum_tokens", "longest_prefix"),
            plan="parallel.balance",
        ),
    ] = "round_robin"
    load_watch_interval: Annotated[
        float,
        inert(
            "Seconds between two looks at the load of the copies.",
            because="all copies are scheduled in one process and their load is always known",
            above=0,
        ),
    ] = 0.1
    prefill_round_robin_balance: Annotated[
        bool, planned("With separate prefill servers: promise that they spread requests in turn.")
    ] = False
    enable_dp_attention: Annotated[
        bool, planned("Share the requests in attention and the experts in the other layers.")
    ] = False
    enable_dp_lm_head: Annotated[
        bool, planned("With data-parallel attention: split the output layer inside each attention group.")
    ] = False
    enable_two_batch_overlap: Annotated[
        bool, planned("Split a batch in two, so that one half communicates while the other computes.")
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float, planned("Imbalance of the two halves from which one sequence may be cut between them.", low=0)
    ] = 0.48
    disable_custom_all_reduce: Annotated[
        bool, planned("Sum over devices with NCCL instead of a kernel of our own.")
    ] = False
    enable_nccl_nvls: Annotated[bool, planned("Let NCCL sum inside the NVLink switch.")] = False
    enable_symm_mem: Annotated[bool, planned("Use NCCL's symmetric memory for sums over devices.")] = False
    enable_mscclpp: Annotated[bool, planned("Use MSCCL++ for small sums over devices.")] = False
    enable_p2p_check: Annotated[
        bool, planned("Test whether GPUs can reach each other's memory instead of assuming it.")
    ] = False
    numa_node: Annotated[
        tuple[int, ...] | None, planned("NUMA node to which each worker process is bound.", low=0)
    ] = None
    enable_pdmux: Annotated[
        bool, planned("Run prompts and output tokens at the same time on separate parts of one GPU.")
    ] = False
    sm_group_num: Annotated[
        int,
        inert(
            "Number of parts of the GPU for --enable-pdmux.",
            because="nothing reads it where it comes from either",
            low=1,
        ),
    ] = 3
