"""Options about several devices, processes, machines and servers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import always, inert, option, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs:
    """Several devices."""

    tp_size: int = option(
        1,
        "Tensor parallelism: number of devices (on a CPU: processes) that share every layer.",
        aliases=("--tensor-parallel-size",),
        low=1,
        plan="parallel.tp_size",
    )
    pp_size: int = option(
        1,
        "Pipeline parallelism: number of stages, each with a share of the layers.",
        aliases=("--pipeline-parallel-size",),
        low=1,
        plan="parallel.pp_size",
    )
    dp_size: int = option(
        1,
        "Data parallelism: number of copies of the model that share the requests. With --enable-dp-attention: number "
        "of groups of ranks within one copy.",
        aliases=("--data-parallel-size",),
        low=1,
        plan="parallel.dp_size",
    )
    max_micro_batch_size: int | None = option(
        None,
        "Maximum number of sequences in a micro-batch of a pipeline. Default: the running sequences divided by the "
        "number of stages.",
        low=1,
        plan="scheduler.max_micro_batch",
    )
    nnodes: int = option(1, "Number of machines that serve the model together.", low=1, plan="parallel.nnodes")
    node_rank: int = option(
        0,
        "Index of this machine, from 0. Machine 0 runs the server. The other machines run workers for it and exit "
        "when it exits.",
        low=0,
        plan="parallel.node_rank",
    )
    dist_init_addr: str | None = option(
        None,
        "host:port of the first machine, to which the other machines connect.",
        aliases=("--nccl-init-addr",),
        plan="parallel.master_address",
    )
    dist_timeout: int | None = option(
        None,
        "Seconds to wait for the other processes at the start. Default: 600.",
        low=1,
        plan="parallel.join_timeout_s",
    )
    nccl_port: int | None = option(
        None,
        "Port of the first machine at which the ranks find each other. Default: any free port. On a single machine the "
        "ranks use a file instead.",
        low=1,
        high=65535,
        plan="parallel.store_port",
    )
    base_gpu_id: int = option(0, "Index of the first GPU to use, as in --device cuda:N.", low=0, plan="model.device")
    gpu_id_step: int = option(1, "Distance between the indices of the GPUs to use.", low=1, plan="parallel.gpu_step")
    load_balance_method: str = option(
        "round_robin",
        "How requests are distributed over the copies of the model. round_robin: in turn; shortest_queue: to the copy "
        "with the fewest requests; minimum_tokens: to the copy whose requests have the fewest tokens; longest_prefix: "
        "to the copy whose cache holds the longest prefix of the prompt, unless that copy is much busier.",
        choices=("round_robin", "shortest_queue", "minimum_tokens", "longest_prefix"),
        plan="parallel.balance",
    )
    load_watch_interval: float = inert(
        0.1,
        "Seconds between two checks of the copies' load.",
        reason="one process schedules all copies, so their load is always known",
        above=0,
    )
    prefill_round_robin_balance: bool = always(
        False,
        "Declare that requests are distributed to the prefill servers in turn.",
        reason="decode servers find pages by their content, whichever prefill server has them",
    )
    enable_dp_attention: bool = option(
        False,
        "Use data parallelism for attention and tensor parallelism for the other layers: the --tp-size ranks form "
        "--dp-size groups, each with its own requests and KV cache, and share MLPs and experts.",
        plan="parallel.dp_attention",
    )
    enable_dp_lm_head: bool = option(
        False,
        "With --enable-dp-attention: each group computes the logits of its own rows. A tied LM head always does.",
        plan="parallel.head_by_group",
    )
    enable_two_batch_overlap: bool = option(
        False,
        "Split each batch into two halves, so that one communicates while the other computes. It needs --tp-size.",
        plan="parallel.two_batches",
        other_unit=True,
    )
    tbo_token_distribution_threshold: float = option(
        0.48,
        "Share of the tokens that the smaller half has at least; otherwise a sequence is split between the halves. 0: "
        "never.",
        low=0,
        high=0.5,
        plan="parallel.two_batches",
        other_unit=True,
    )
    disable_custom_all_reduce: bool = always(
        False,
        "Use NCCL instead of a custom all-reduce kernel.",
        reason="NCCL sums, except for small tensors with --enable-symm-mem",
        sglang="off: a custom kernel sums small tensors",
    )
    enable_nccl_nvls: bool = always(
        False,
        "Let NCCL sum inside the NVLink switch (NVLS).",
        reason="NCCL uses NVLS if the hardware supports it, unless the environment has NCCL_NVLS_ENABLE=0",
    )
    enable_symm_mem: bool = option(
        False,
        "Sum small tensors of the --tp-size GPUs (up to 512 KiB, as in decode steps) in one kernel that reads the "
        "memory of all GPUs, also inside CUDA graphs. NCCL sums larger ones. It needs GPUs of one machine that can "
        "read each other's memory, and a model in bfloat16 or float32; a test sum at the start checks this.",
        plan="parallel.symmetric_memory",
    )
    enable_mscclpp: bool = refused(
        False,
        "Use MSCCL++ for all-reduce of small tensors.",
        reason="it needs the mscclpp package and NVIDIA GPUs",
        instead="use --enable-symm-mem, which sums small tensors without a package",
    )
    enable_p2p_check: bool = inert(
        False,
        "Test whether GPUs can access each other's memory, instead of assuming it.",
        reason="--enable-symm-mem and NCCL make their own tests at the start",
    )
    numa_node: tuple[int, ...] | None = option(
        None,
        "NUMA node of each rank on this machine: the rank's process runs on the node's CPUs only, and takes memory "
        "from the node first. Rank 0 is the server's process. Default: ranks are not bound.",
        low=0,
        plan="parallel.numa_nodes",
    )
    enable_pdmux: bool = refused(
        False,
        "Run prefill and decode at the same time on separate parts of a GPU.",
        reason="it needs an NVIDIA GPU and streams that use only some of its processors (CUDA's green contexts)",
        instead="use --disaggregation-prefill-replicas with several GPUs, or a smaller --chunked-prefill-size",
    )
    sm_group_num: int = inert(
        3,
        "Number of parts of the GPU for --enable-pdmux.",
        reason="SGLang does not read it either",
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationArgs:
    """Separate prefill and decode servers."""

    disaggregation_mode: str = option(
        "null",
        "Role of this server. prefill: compute prompts, keep their KV pages in host memory, and offer them to decode "
        "servers. decode: fetch the pages of prompts from the servers of --disaggregation-prefill. null: both.",
        choices=("null", "prefill", "decode"),
        plan="cache.role",
    )
    disaggregation_transfer_backend: str = always(
        "tcp",
        "Transfer of the KV cache between servers.",
        choices=("tcp", "mooncake", "nixl", "ascend", "fake"),
        built=("tcp",),
        needs={
            "mooncake": "the package mooncake-transfer-engine and an RDMA network card",
            "nixl": "the package nixl and an RDMA network card or NVLink",
            "ascend": "a Huawei NPU",
            "fake": "a measurement that ignores the output, because it transfers no pages",
        },
        instead="use tcp",
        reason="pages travel over TCP",
        sglang="mooncake",
    )
    disaggregation_bootstrap_port: int = option(
        8998,
        "Port at which rank 0 of a prefill server offers pages; the other ranks use the ports after it, attention "
        "group by attention group. With "
        "--disaggregation-prefill-replicas, the first port of the prefill replicas on 127.0.0.1.",
        low=1,
        high=65535,
        plan="cache.storage_config",
    )
    disaggregation_prefill: tuple[str, ...] | None = option(
        None,
        "Prefill servers from which a decode server fetches pages, HOST:PORT with their bootstrap ports. It connects "
        "to no other address.",
        plan="cache.storage_config",
    )
    disaggregation_prefill_replicas: int = option(
        0,
        "Of the --dp-size replicas of this server, the number that compute prompts. The others generate the outputs. "
        "Penstock only.",
        low=0,
        plan="parallel.prefill_replicas",
    )
    disaggregation_decode_tp: int | None = always(
        None,
        "Tensor parallelism of the decode servers. A value that gives their attention groups another number of ranks "
        "than this server's is refused.",
        reason="a page travels between ranks of the same number",
        low=1,
    )
    disaggregation_decode_dp: int | None = always(
        None,
        "Attention groups of the decode servers (their --dp-size with --enable-dp-attention). Default: as this server.",
        reason="decode servers find pages by their content, in every attention group",
        low=1,
    )
    disaggregation_prefill_pp: int = always(
        1,
        "Pipeline parallelism of the prefill servers. Another value than this server's --pp-size is refused.",
        reason="a page travels between ranks of the same number",
        low=1,
    )
    disaggregation_ib_device: str | None = refused(
        None,
        "InfiniBand devices that transfer the KV cache, separated by commas.",
        reason="it needs the package mooncake-transfer-engine or nixl and an RDMA network card",
        instead="leave it out, and for IP over InfiniBand give --disaggregation-prefill the addresses of that network",
    )
    disaggregation_decode_polling_interval: int = inert(
        1,
        "Steps of a decode server between two checks for received KV caches.",
        reason="a task beside the steps checks every few milliseconds, so no step waits for it",
        low=1,
    )
    num_reserved_decode_tokens: int = option(
        512,
        "Output tokens of each running request for which a decode server keeps pages free when it admits another one.",
        low=0,
        plan="scheduler.reserved_tokens",
        other_unit=True,
    )
