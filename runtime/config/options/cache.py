"""Options about the KV cache: how much memory it gets, its pages, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArgs:
    """KV cache."""

    mem_fraction_static: Annotated[
        float | None,
        OptionSpec(
            "Share of the device's memory, between 0 and 1, for weights and KV cache together. Default: on "
            "a GPU nearly all of it, with a reserve for activations; on a CPU the KV cache gets at most 30 "
            "% of the memory that is free once the weights are loaded.",
            above=0,
            high=1,
            plan="cache.mem_fraction",
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        OptionSpec(
            "Upper limit of the KV cache in tokens, rounded down to whole pages. Default: as many as the "
            "memory share holds.",
            low=1,
            plan="cache.max_total_tokens",
        ),
    ] = None
    page_size: Annotated[
        int | None,
        OptionSpec(
            "Tokens in one page of the KV cache. A prefix is shared in whole pages, so small pages share "
            "more and large ones are read faster. Default: 16.",
            low=1,
            high=1024,
            plan="cache.page_size",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        OptionSpec(
            "Precision of the KV cache. auto: that of the model. fp8_e5m2 and fp8_e4m3 take one byte per value, "
            "so that twice as many tokens as in 16 bits fit, less exactly.",
            choices=("auto", "fp8_e5m2", "fp8_e4m3"),
            plan="cache.kv_dtype",
        ),
    ] = "auto"
    disable_radix_cache: Annotated[
        bool,
        OptionSpec(
            "Forget a sequence's KV when it ends instead of keeping it for prompts that begin the same way.",
            plan="cache.prefix_cache",
        ),
    ] = False
    hybrid_kvcache_ratio: Annotated[
        float | None,
        planned(
            "For Llama 4: how far the cache follows the chunked attention layers, from 0 (all layers alike) "
            "to 1. The bare flag means 0.5.",
            const=0.5,
            low=0,
            high=1,
        ),
    ] = None
    swa_full_tokens_ratio: Annotated[
        float,
        planned(
            "For models with sliding windows: size of the window layers' pool as a share of the full "
            "layers' pool.",
            above=0,
            high=1,
        ),
    ] = 0.8
    disable_hybrid_swa_memory: Annotated[
        bool,
        planned(
            "Give sliding-window layers a pool as large as the others' instead of a smaller one of their own."
        ),
    ] = False
    max_mamba_cache_size: Annotated[
        int | None,
        planned(
            "Number of recurrent states kept for models with Mamba-like layers; bounds the running requests.",
            low=1,
        ),
    ] = None
    mamba_ssm_dtype: Annotated[
        str,
        planned("Precision of the recurrent states of Mamba-like layers.", choices=("float32", "bfloat16")),
    ] = "float32"
