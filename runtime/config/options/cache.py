"""Options about the KV cache: its memory, pages and precision, prefix caching, and tiers in host memory and storage."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, option, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArgs:
    """KV cache."""

    mem_fraction_static: float | None = option(
        None,
        "Share of the device's memory, between 0 and 1, for weights and KV cache together. Default: on a GPU, "
        "nearly all memory, except a reserve for activations; on a CPU, the KV cache gets at most 30 % of the "
        "memory that is free after the weights are loaded.",
        above=0,
        high=1,
        sglang="on a GPU the same; on a CPU 0.88 of all memory",
        plan="cache.mem_fraction",
    )
    max_total_tokens: int | None = option(
        None,
        "Upper limit on the size of the KV cache in tokens, rounded down to whole pages. Default: as many tokens as "
        "fit into its share of memory.",
        low=1,
        plan="cache.max_total_tokens",
    )
    page_size: int | None = option(
        None,
        "Tokens per page of the KV cache. Prefixes are shared in whole pages, so small pages share more tokens, "
        "and large pages are read faster. Default: 16, and 64 with trtllm_mla.",
        low=1,
        high=1024,
        sglang="1, or what the attention backend needs",
        plan="cache.page_size",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache. auto: the model's dtype. fp8_e5m2 and fp8_e4m3 take one byte per value: the "
        "cache holds twice as many tokens as with 16 bits, with less accuracy.",
        choices=("auto", "fp8_e5m2", "fp8_e4m3"),
        plan="cache.kv_dtype",
    )
    prefix_pin_share: float = option(
        0.25,
        "Share of the KV cache for prompts that requests ask to keep: with prompt_cache_key, session_id in a body, or "
        "Anthropic's cache_control. They are evicted last. If they exceed the share, the client with "
        "most of them loses its oldest one. 0: the hints have no effect.",
        low=0,
        high=1,
        plan="cache.pin_share",
    )
    disable_radix_cache: bool = option(
        False,
        "Turn prefix caching off: free the KV of a sequence when it ends, instead of keeping it for prompts with the "
        "same prefix.",
        plan="cache.prefix_cache",
        invert=True,
    )
    hybrid_kvcache_ratio: float | None = option(
        None,
        "For models with chunked attention (Llama 4): size of the chunked layers' pool, from 0 (as large as that of "
        "the full layers) to 1 (the share that a chunk is of the context length). The bare flag means 0.5. Default: "
        "--swa-full-tokens-ratio applies.",
        const=0.5,
        low=0,
        high=1,
        plan="cache.window_ratio",
        other_unit=True,
    )
    swa_full_tokens_ratio: float = option(
        0.8,
        "For models with sliding windows: size of the window layers' pool as a share of the full layers' pool.",
        above=0,
        high=1,
        plan="cache.window_ratio",
    )
    disable_hybrid_swa_memory: bool = option(
        False,
        "Give sliding-window layers a pool as large as that of the full layers, instead of a smaller pool.",
        plan="cache.window_ratio",
        invert=True,
    )
    max_mamba_cache_size: int | None = option(
        None,
        "Number of states kept for models with recurrent layers. Each running request takes two states, plus one for "
        "each draft token of speculative decoding. One further state per request is left for cached prefixes. Default: "
        "as many as fit into memory.",
        low=2,
        plan="cache.max_states",
    )
    swap_space: float = option(
        0.0,
        "Host memory in GiB per rank for the KV of preempted requests. A preempted request gets its KV back when it "
        "resumes. Without swap space, or if it is full, the KV is recomputed.",
        low=0,
        plan="cache.swap_space_gib",
    )
    mamba_ssm_dtype: str = option(
        "float32",
        "Precision of the states of recurrent layers. The convolutions' states are always float32.",
        choices=("float32", "bfloat16"),
        plan="model.state_dtype",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyArgs:
    """KV cache in host memory and storage."""

    enable_hierarchical_cache: bool = option(
        False,
        "Keep pages of prefixes in host memory too, and copy them back when a request needs them and the device has "
        "evicted them. Sliding-window layers then keep all tokens.",
        plan="cache.host_tier",
    )
    hicache_ratio: float = option(
        2.0,
        "Size of the host tier as a multiple of the device's KV cache.",
        above=0,
        plan="cache.host_ratio",
    )
    hicache_size: int = option(
        0,
        "Size of the host tier in gigabytes (10^9 bytes) per rank; 0: --hicache-ratio decides.",
        low=0,
        plan="cache.host_gb",
    )
    hicache_write_policy: str = option(
        "write_through",
        "When pages are copied to the host: when they are computed (write_through), when a second request uses them "
        "(write_through_selective), or when the device evicts them (write_back).",
        choices=("write_back", "write_through", "write_through_selective"),
        plan="cache.write_policy",
    )
    hicache_io_backend: str = option(
        "kernel",
        "How a GPU copies pages to and from the host: by a kernel, or by copies of the library (direct). On a CPU, "
        "both are the same.",
        choices=("direct", "kernel"),
        plan="cache.copy_backend",
    )
    hicache_mem_layout: str = option(
        "layer_first",
        "Order of the host tier in memory: layer by layer or page by page (page_first, page_first_direct). A page is "
        "then one block of memory, which storage reads and writes faster.",
        choices=("layer_first", "page_first", "page_first_direct"),
        plan="cache.host_layout",
    )
    hicache_storage_backend: str | None = option(
        None,
        "Storage behind the host tier, which keeps prefixes beyond a restart and for other servers: files in a folder "
        "(file), or a class of your own (dynamic). Default: none.",
        choices=("file", "dynamic", "mooncake", "hf3fs", "nixl"),
        built=("file", "dynamic"),
        needs={
            "mooncake": "the package mooncake-transfer-engine and a Mooncake master server",
            "hf3fs": "a 3FS cluster and its client library",
            "nixl": "the package nixl and a store that it can reach",
        },
        instead="use file on a shared folder, or dynamic with a class that calls its client",
        plan="cache.storage",
    )
    hicache_storage_prefetch_policy: str = option(
        "timeout",
        "How long a request waits for pages from storage: not at all (best_effort; the pages serve later requests), "
        "for all of them (wait_complete), or as long as computing its prompt would take (timeout).",
        choices=("best_effort", "wait_complete", "timeout"),
        sglang="best_effort",
        plan="cache.prefetch_policy",
    )
    hicache_storage_backend_extra_config: Json = option(
        {},
        "JSON object with settings of the storage backend. file: path (folder), max_gb (limit of the folder's size in "
        "10^9 bytes), dynamic: module_path and class_name. Both: threads, and prefetch_threshold, the number of "
        "tokens below which a prompt is not looked up (default 256).",
        plan="cache.storage_config",
    )
    enable_lmcache: bool = refused(
        False,
        "Use the LMCache package as the store of prefixes.",
        reason="it needs the lmcache package, a GPU, and the cache and memory layout of SGLang or vLLM",
        instead="use --enable-hierarchical-cache with --hicache-storage-backend file or a class of your own (dynamic)",
    )
