"""The cache's section of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ops.backends import ATTENTION
from ops.machine import GIB, Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import CachePlan, Plan
from runtime.config.resolve.parallel import ranks_here
from runtime.config.resolve.plan_builder import Decision, PlanBuilder
from runtime.errors import ConfigurationError
from runtime.page_store.protocol import check_config

PAGE_SIZE = 16
LOCAL_HOST = "127.0.0.1"
SHARE_OF_FREE_MEMORY = 0.3
FLOAT8 = {"fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
E4M3_CAPABILITY = (8, 9)  # lowest compute capability for which Triton supports e4m3


def cache_plan(builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts) -> CachePlan:
    """Plan the KV cache. `gpu` is None on a CPU; `dtype` is the model's dtype."""
    args = builder.args.cache
    for option in ("max_mamba_cache_size", "mamba_ssm_dtype"):
        if builder.args.changed(option) and facts.path and not facts.recurrent:
            builder.refuse(option, f"--{option.replace('_', '-')}: {facts.architecture} has no recurrent layers.")
    page_size, cap = _page_size(builder), args.max_total_tokens
    if cap is not None and cap < page_size.value:
        builder.refuse(
            "max_total_tokens", f"--max-total-tokens {cap} is less than one page of {page_size.value} tokens."
        )
    of_free_memory = args.mem_fraction_static is None and gpu is None
    return builder.build(
        CachePlan,
        page_size=page_size,
        prefix_cache=_prefix_cache(builder, facts),
        kv_dtype=_kv_dtype(builder, gpu, dtype),
        mem_fraction=_mem_fraction(builder, gpu),
        of_free_memory=Decision(of_free_memory, "on a CPU without --mem-fraction-static"),
        window_ratio=_window_ratio(builder, facts),
        host_tier=_host_tier(builder, facts),
        host_layout=_host_layout(builder),
        same_pages=_same_pages(builder, facts),
        **_disaggregation(builder, facts),
        swap_space_gib=_swap_space(builder, machine, facts),
    )


def _prefix_cache(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    if facts.needs_whole_prompts:
        return Decision(False, "embeddings of this model need the whole text in one step")
    return builder.follow("disable_radix_cache", not builder.args.cache.disable_radix_cache)


def _swap_space(builder: PlanBuilder, machine: Machine, facts: ModelFacts) -> Decision[float]:
    """Decide the swap space, and refuse one that is larger than host memory.

    Swap space also depends on whether the cache has a separate pool for sliding-window layers. This is not known yet;
    the replica checks it later.
    """
    asked, ranks = builder.args.cache.swap_space, ranks_here(builder.args.parallel)
    if asked * ranks * GIB > machine.total_bytes > 0:
        builder.refuse(
            "swap_space",
            f"--swap-space {asked:g} takes {asked * ranks:g} GiB of host memory for {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'}, and this machine has {machine.total_bytes / GIB:.1f}.",
        )
    if facts.recurrent:
        return Decision(0.0, "states of recurrent layers cannot be swapped; they are recomputed")
    if facts.is_encoder:
        return Decision(0.0, "this model caches nothing")
    return builder.follow("swap_space")


HOST_OPTIONS = (
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "hicache_storage_backend_extra_config",
)


def _host_layout(builder: PlanBuilder) -> Decision[str]:
    args = builder.args.hierarchy
    if _role_flag(builder) is not None:
        return Decision("page_first", "pages travel as blocks")
    if args.hicache_storage_backend is None:
        if args.hicache_storage_backend_extra_config:
            builder.refuse(
                "hicache_storage_backend_extra_config",
                "--hicache-storage-backend-extra-config needs --hicache-storage-backend.",
            )
        return builder.follow("hicache_mem_layout")
    try:
        check_config(args.hicache_storage_backend, dict(args.hicache_storage_backend_extra_config))
    except ConfigurationError as error:
        builder.refuse("hicache_storage_backend_extra_config", str(error))
    if args.hicache_mem_layout != "layer_first":
        return builder.follow("hicache_mem_layout")
    return Decision("page_first", "storage reads and writes whole pages")


def _role_flag(builder: PlanBuilder) -> str | None:
    """Return the option that separates prefill from decode, or None if each replica does both."""
    args = builder.args.disaggregation
    if args.disaggregation_prefill_replicas:
        return "--disaggregation-prefill-replicas"
    return None if args.disaggregation_mode == "null" else f"--disaggregation-mode {args.disaggregation_mode}"


def _prefill_replicas(builder: PlanBuilder) -> dict[str, Decision[Any]]:
    """Decide the storage backend with which prefill replicas pass on their pages; see `actors/prefill_replicas.py`."""
    args, parallel = builder.args.disaggregation, builder.args.parallel
    option, flag = "disaggregation_prefill_replicas", "--disaggregation-prefill-replicas"
    last_port = (
        args.disaggregation_bootstrap_port
        + args.disaggregation_prefill_replicas * parallel.tp_size * parallel.pp_size
        - 1
    )
    problems = {
        f"needs a larger --dp-size: {args.disaggregation_prefill_replicas} of {parallel.dp_size} replicas compute "
        "prompts, and at least one must generate": args.disaggregation_prefill_replicas >= parallel.dp_size,
        f"cannot be combined with --disaggregation-mode {args.disaggregation_mode}": args.disaggregation_mode != "null",
        "cannot be combined with --enable-dp-attention, whose replicas share their steps": parallel.enable_dp_attention,
        "cannot be combined with --hicache-storage-backend": builder.args.hierarchy.hicache_storage_backend is not None,
        f"needs the ports up to {last_port}; set a smaller --disaggregation-bootstrap-port": last_port > 65535,
    }
    for problem, is_there in problems.items():
        if is_there:
            builder.refuse(option, f"{flag} {problem}.")
    config = {"prefetch_threshold": 1, "port": args.disaggregation_bootstrap_port}
    return {
        "role": Decision("replicas", f"with {flag}"),
        "storage_config": Decision(config, f"{flag} moves pages through host memory"),
        "prefetch_policy": Decision("wait_complete", "the prompt is computed elsewhere"),
    }


def plan_of_replica(plan: Plan, index: int) -> Plan:
    """Return the plan of replica `index`. Prefill replicas offer their KV cache pages; decode replicas read them."""
    num_prefill = plan.parallel.prefill_replicas
    if not num_prefill:
        return plan
    config, ranks = dict(plan.cache.storage_config), plan.parallel.ranks
    first_port = config.pop("port")
    ports = [first_port + number * ranks for number in range(num_prefill)]  # each replica has one port per rank
    if index < num_prefill:
        cache = replace(
            plan.cache, storage="prefill", storage_config=config | {"host": LOCAL_HOST, "port": ports[index]}
        )
        return replace(plan, cache=cache)
    peers = [[LOCAL_HOST, port] for port in ports]
    cache = replace(plan.cache, storage="decode", storage_config=config | {"peers": peers})
    return replace(plan, cache=cache, scheduler=replace(plan.scheduler, last_chunk_tokens=None))


def _disaggregation(builder: PlanBuilder, facts: ModelFacts) -> dict[str, Decision[Any]]:
    """Decide the storage backend of a prefill or decode server.

    A prefill server offers its pages to decode servers. A decode server reads the pages of its prefill servers.
    """
    args, flag = builder.args.disaggregation, "--disaggregation-mode"
    role = args.disaggregation_mode
    _check_counterparts(builder, facts)
    if role != "decode" and args.disaggregation_prefill:
        builder.refuse("disaggregation_prefill", f"--disaggregation-prefill needs {flag} decode.")
    if args.disaggregation_prefill_replicas:
        return _prefill_replicas(builder)
    if role == "null":
        return {"storage_config": builder.follow("hicache_storage_backend_extra_config")}
    reason = f"{flag} {role} moves pages through host memory"
    if builder.args.hierarchy.hicache_storage_backend is not None:
        builder.refuse("hicache_storage_backend", f"--hicache-storage-backend cannot be combined with {flag}.")
    parallel = builder.args.parallel
    if parallel.dp_size > 1 and not parallel.enable_dp_attention:
        builder.refuse(
            "disaggregation_mode",
            f"{flag} {role} takes one replica or attention groups (--enable-dp-attention); leave --dp-size out, or set "
            "--disaggregation-prefill-replicas alone.",
        )
    config: dict[str, Any] = {"prefetch_threshold": 1}
    last_port = args.disaggregation_bootstrap_port + parallel.tp_size * parallel.pp_size - 1
    if role == "prefill":
        if last_port > 65535:
            builder.refuse(
                "disaggregation_bootstrap_port",
                f"--disaggregation-bootstrap-port: the ranks need the ports up to {last_port}; set a smaller one.",
            )
        config |= {"host": builder.args.http.host, "port": args.disaggregation_bootstrap_port}
    else:
        peers = [peer.rpartition(":") for peer in args.disaggregation_prefill or ()]
        if not peers or not all(host and port.isdigit() and 0 < int(port) < 65536 for host, _, port in peers):
            builder.refuse("disaggregation_prefill", f"{flag} decode needs --disaggregation-prefill HOST:PORT ...")
        config["peers"] = [[host, int(port)] for host, _, port in peers if port.isdigit()]
    return {
        "storage": Decision(role, reason),
        "storage_config": Decision(config, reason),
        "prefetch_policy": Decision("wait_complete", "the prompt is computed elsewhere"),
    }


def _same_pages(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    if facts.latent_dims is None or facts.by_transformers:
        return Decision(False, "each rank has the KV of its heads")
    if builder.args.parallel.pp_size > 1:
        return Decision(False, "each stage has the KV of its layers")
    if builder.args.speculative.speculative_algorithm not in (None, "NGRAM"):
        return Decision(False, "pages have the KV of the draft model too")
    return Decision(True, "latent vectors belong to all heads")


def _check_counterparts(builder: PlanBuilder, facts: ModelFacts) -> None:
    """Refuse options that say that the other servers divide a sequence's KV cache among ranks in another way."""
    args, parallel = builder.args.disaggregation, builder.args.parallel
    same = "a page travels from a rank to the same rank of the other server, so both need the same"
    groups = parallel.dp_size if parallel.enable_dp_attention else 1
    own = parallel.tp_size // groups
    tp, dp = args.disaggregation_decode_tp, args.disaggregation_decode_dp or groups
    if tp is not None and tp != own * dp and facts.path and not _same_pages(builder, facts).value:
        divided = f" in {dp} attention groups" if dp > 1 else ""
        builder.refuse(
            "disaggregation_decode_tp",
            f"--disaggregation-decode-tp {tp}{divided}: {same} --tp-size by attention group, here {own}.",
        )
    if args.disaggregation_prefill_pp != parallel.pp_size and builder.args.changed("disaggregation_prefill_pp"):
        builder.refuse(
            "disaggregation_prefill_pp",
            f"--disaggregation-prefill-pp {args.disaggregation_prefill_pp}: {same} --pp-size, here {parallel.pp_size}.",
        )


def _host_tier(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    role_flag = _role_flag(builder)
    flag = role_flag or "--enable-hierarchical-cache"
    if not builder.args.hierarchy.enable_hierarchical_cache and role_flag is None:
        for option in HOST_OPTIONS:
            if builder.args.changed(option):
                builder.refuse(option, f"--{option.replace('_', '-')} needs {flag}.")
        return builder.follow("enable_hierarchical_cache")
    reason = None
    if builder.args.cache.disable_radix_cache:
        reason = "--disable-radix-cache turns prefix caching off, so no prefixes are kept; leave one of them out"
    elif facts.is_encoder or facts.needs_whole_prompts:
        reason = "this model caches nothing; leave the option out"
    elif facts.recurrent:
        reason = "states of recurrent layers cannot be copied to the host; leave the option out"
    if reason is not None:
        builder.refuse("enable_hierarchical_cache", f"{flag}: {reason}.")
    if role_flag is not None:
        return Decision(True, f"{flag} moves pages through host memory")
    return builder.follow("enable_hierarchical_cache")


def _page_size(builder: PlanBuilder) -> Decision[int]:
    for option in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        name = builder.args.get(option)
        sizes = ATTENTION[name].page_sizes if name in ATTENTION else ()
        if sizes and PAGE_SIZE not in sizes:
            return builder.follow_or("page_size", max(sizes), f"{name} reads no pages of {PAGE_SIZE} tokens")
    reason = "pages of 16 tokens are read faster than single tokens, and prefixes still share most of their tokens"
    return builder.follow_or("page_size", PAGE_SIZE, reason)


def _window_ratio(builder: PlanBuilder, facts: ModelFacts) -> Decision[float | None]:
    args = builder.args.cache
    share, flag = args.hybrid_kvcache_ratio, "--hybrid-kvcache-ratio"
    if share is not None and facts.path and not facts.attention_chunk:
        text = "this model has no layers with chunked attention; for sliding windows, use --swa-full-tokens-ratio"
        builder.refuse("hybrid_kvcache_ratio", f"{flag}: {text}.")
    elif share is not None and (args.disable_hybrid_swa_memory or builder.args.changed("swa_full_tokens_ratio")):
        other = "--disable-hybrid-swa-memory" if args.disable_hybrid_swa_memory else "--swa-full-tokens-ratio"
        builder.refuse("hybrid_kvcache_ratio", f"{flag} and {other} set the same pool; give one of them.")
    if builder.args.hierarchy.enable_hierarchical_cache or _role_flag(builder) is not None:
        return Decision(None, "with --enable-hierarchical-cache, so that all their pages can be copied")
    if args.disable_hybrid_swa_memory:
        return Decision(None, "as asked with --disable-hybrid-swa-memory")
    if share is not None and facts.attention_chunk:
        context = builder.args.model.context_length or facts.context_length
        ratio = 1 - share + share * min(1.0, facts.attention_chunk / context)
        return Decision(ratio, f"{flag} {share:g}, with chunks of {facts.attention_chunk} of {context} tokens")
    return Decision(args.swa_full_tokens_ratio, "sliding-window layers keep only their window")


def _kv_dtype(builder: PlanBuilder, gpu: Gpu | None, dtype: str) -> Decision[str]:
    asked = builder.args.cache.kv_cache_dtype
    if asked == "auto":
        return Decision(dtype, "the model's dtype")
    if asked == "fp8_e4m3" and gpu is not None and gpu.capability < E4M3_CAPABILITY:
        builder.refuse(
            "kv_cache_dtype",
            f"--kv-cache-dtype {asked} needs compute capability 8.9 or newer, and {gpu.name} has "
            f"{gpu.capability[0]}.{gpu.capability[1]}; use fp8_e5m2.",
        )
        return Decision(dtype, "the requested value cannot be used")
    return Decision(FLOAT8.get(asked, asked), "as asked")


def _mem_fraction(builder: PlanBuilder, gpu: Gpu | None) -> Decision[float]:
    asked = builder.args.cache.mem_fraction_static
    if asked is not None:
        return Decision(asked, "as asked, of all memory")
    if gpu is None:
        reason = "share of the memory that is free after loading; the rest is left to other programs"
        return Decision(SHARE_OF_FREE_MEMORY, reason)
    parallel = builder.args.parallel
    reserve = _reserve_bytes(gpu.memory_bytes, parallel.tp_size * parallel.pp_size)
    fraction = max(0.05, round(1 - reserve / gpu.memory_bytes, 3))
    return Decision(fraction, f"{reserve / GIB:.1f} GiB of {gpu.memory_bytes / GIB:.0f} stay free for activations")


def _reserve_bytes(memory_bytes: int, ranks: int) -> int:
    """Return the bytes that a GPU with this memory keeps free."""
    for below, reserve in ((35, 2.8 + ranks / 10), (90, 9.5 + ranks / 2), (160, 12 + ranks / 2)):
        if memory_bytes < below * GIB:
            return int(reserve * GIB)
    return 32 * GIB
