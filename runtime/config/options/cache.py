"""Options about the KV cache: how much memory it gets, its pages, what it keeps, and its further tiers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, option, planned
from runtime.config.plan import CachePlan, ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArgs:
    """KV cache."""

    mem_fraction_static: float | None = option(
        None,
        "Share of the device's memory, between 0 and 1, for weights and KV cache together. Default: on a GPU "
        "nearly all of it, with a reserve for activations; on a CPU the KV cache gets at most 30 % of the "
        "memory that is free once the weights are loaded.",
        above=0,
        high=1,
        sglang="on a GPU the same; on a CPU 0.88 of all memory",
        plan=CachePlan.mem_fraction,
    )
    max_total_tokens: int | None = option(
        None,
        "Upper limit of the KV cache in tokens, rounded down to whole pages. Default: as many as the memory "
        "share holds.",
        low=1,
        plan=CachePlan.max_total_tokens,
    )
    page_size: int | None = option(
        None,
        "Tokens in one page of the KV cache. A prefix is shared in whole pages, so small pages share more "
        "and large ones are read faster. Default: 16.",
        low=1,
        high=1024,
        sglang="1, or what the attention backend needs",
        plan=CachePlan.page_size,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache. auto: that of the model. fp8_e5m2 and fp8_e4m3 take one byte per value, "
        "so that twice as many tokens as in 16 bits fit, less exactly.",
        choices=("auto", "fp8_e5m2", "fp8_e4m3"),
        plan=CachePlan.kv_dtype,
    )
    disable_radix_cache: bool = option(
        False,
        "Forget a sequence's KV when it ends instead of keeping it for prompts that begin the same way.",
        plan=CachePlan.prefix_cache,
        says="the opposite",
    )
    hybrid_kvcache_ratio: float | None = planned(
        None,
        "For Llama 4: how far the cache follows the chunked attention layers, from 0 (all layers alike) to "
        "1. The bare flag means 0.5.",
        const=0.5,
        low=0,
        high=1,
    )
    swa_full_tokens_ratio: float = option(
        0.8,
        "For models with sliding windows: size of the window layers' pool as a share of the full layers' "
        "pool.",
        above=0,
        high=1,
        plan=CachePlan.window_ratio,
    )
    disable_hybrid_swa_memory: bool = option(
        False,
        "Give sliding-window layers a pool as large as the others' instead of a smaller one of their own.",
        plan=CachePlan.window_ratio,
        says="the opposite",
    )
    max_mamba_cache_size: int | None = option(
        None,
        "Number of states kept for models with recurrent layers: two for each running request, at most a third of "
        "this number of requests run together, and the others are kept behind prefixes. Default: by memory.",
        low=2,
        plan=CachePlan.max_states,
    )
    mamba_ssm_dtype: str = option(
        "float32",
        "Precision of the states of recurrent layers; the last inputs of their convolutions are kept in float32.",
        choices=("float32", "bfloat16"),
        plan=ModelPlan.state_dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyArgs:
    """KV cache in host memory and storage."""

    enable_hierarchical_cache: bool = planned(
        False,
        "Keep prefixes that no longer fit on the device in host memory and bring them back when needed.",
    )
    hicache_ratio: float = planned(
        2.0, "Size of the host tier as a multiple of the device's KV cache; more than 1.", above=0
    )
    hicache_size: int = planned(
        0, "Size of the host tier in gigabytes for each rank; 0 leaves it to --hicache-ratio.", low=0
    )
    hicache_write_policy: str = planned(
        "write_through",
        "When pages are copied to the host: at the first use (write_through), at the second "
        "(write_through_selective), or when the device evicts them (write_back).",
        choices=("write_back", "write_through", "write_through_selective"),
    )
    hicache_io_backend: str = planned(
        "kernel",
        "How pages move between device and host: by copies (direct) or by a kernel.",
        choices=("direct", "kernel"),
    )
    hicache_mem_layout: str = planned(
        "layer_first",
        "Order of the host tier in memory: layer by layer or page by page.",
        choices=("layer_first", "page_first", "page_first_direct"),
    )
    hicache_storage_backend: str | None = planned(
        None,
        "Storage behind the host tier: files on disk, or a service. Default: none.",
        choices=("file", "mooncake", "hf3fs", "nixl"),
    )
    hicache_storage_prefetch_policy: str = planned(
        "best_effort",
        "How long a request waits for pages from storage: not at all (best_effort), for all of them "
        "(wait_complete), or up to a limit (timeout).",
        choices=("best_effort", "wait_complete", "timeout"),
    )
    hicache_storage_backend_extra_config: Json = planned(
        {}, "JSON object with settings of the storage backend."
    )
    enable_lmcache: bool = planned(False, "Use the LMCache package as the store of prefixes.")
