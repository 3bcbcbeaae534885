"""The cache's section of the plan."""

from __future__ import annotations

from ops.machine import GIB, Gpu
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import CachePlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder, build

PAGE_SIZE = 16
SHARE_OF_FREE_MEMORY = 0.3
FLOAT8 = {"fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
E4M3_CAPABILITY = (8, 9)  # below it Triton has no e4m3


def cache_plan(builder: PlanBuilder, gpu: Gpu | None, dtype: str, facts: ModelFacts) -> CachePlan:
    """`gpu` is that of the plan, None on a CPU; `dtype` is the model's."""
    args = builder.args.cache
    for option in ("max_mamba_cache_size", "mamba_ssm_dtype"):
        if builder.args.changed(option) and facts.path and not facts.recurrent:
            builder.refuse(
                option, f"--{option.replace('_', '-')}: {facts.architecture} has no recurrent layers."
            )
    page_size, cap = _page_size(builder), args.max_total_tokens
    if cap is not None and cap < page_size.value:
        builder.refuse(
            "max_total_tokens", f"--max-total-tokens {cap} is less than one page of {page_size.value} tokens."
        )
    of_free_memory = args.mem_fraction_static is None and gpu is None
    return build(
        CachePlan,
        page_size=page_size,
        prefix_cache=_prefix_cache(builder, facts),
        kv_dtype=_kv_dtype(builder, gpu, dtype),
        mem_fraction=_mem_fraction(builder, gpu),
        of_free_memory=Decision(of_free_memory, "only without a GPU, and if no fraction was asked for"),
        max_total_tokens=builder.follow("max_total_tokens"),
        window_ratio=_window_ratio(builder),
        max_states=builder.follow("max_mamba_cache_size"),
    )


def _prefix_cache(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    if facts.needs_whole_prompts:
        return Decision(False, "vectors of this model are made of all tokens, computed in one step")
    return builder.follow("disable_radix_cache", not builder.args.cache.disable_radix_cache)


def _page_size(builder: PlanBuilder) -> Decision[int]:
    asked = builder.args.cache.page_size
    if asked is not None:
        return Decision(asked, "as asked")
    return Decision(
        PAGE_SIZE, "pages of 16 are read faster than single tokens, and cut little off shared prefixes"
    )


def _window_ratio(builder: PlanBuilder) -> Decision[float | None]:
    args = builder.args.cache
    if args.disable_hybrid_swa_memory:
        return Decision(None, "as asked with --disable-hybrid-swa-memory")
    return Decision(args.swa_full_tokens_ratio, "layers with a sliding window hold their window only")


def _kv_dtype(builder: PlanBuilder, gpu: Gpu | None, dtype: str) -> Decision[str]:
    asked = builder.args.cache.kv_cache_dtype
    if asked == "auto":
        return Decision(dtype, "that of the model")
    if asked == "fp8_e4m3" and gpu is not None and gpu.capability < E4M3_CAPABILITY:
        builder.refuse(
            "kv_cache_dtype",
            f"--kv-cache-dtype {asked} needs compute capability 8.9 or newer, and {gpu.name} has "
            f"{gpu.capability[0]}.{gpu.capability[1]}; use fp8_e5m2.",
        )
        return Decision(dtype, "what was asked for cannot be used")
    return Decision(FLOAT8.get(asked, asked), "as asked")


def _mem_fraction(builder: PlanBuilder, gpu: Gpu | None) -> Decision[float]:
    asked = builder.args.cache.mem_fraction_static
    if asked is not None:
        return Decision(asked, "as asked, of all memory")
    if gpu is None:
        reason = "of the memory that is free once the weights are loaded; the rest stays for other programs"
        return Decision(SHARE_OF_FREE_MEMORY, reason)
    parallel = builder.args.parallel
    reserve = _reserve_bytes(gpu.memory_bytes, parallel.tp_size * parallel.pp_size)
    fraction = max(0.05, round(1 - reserve / gpu.memory_bytes, 3))
    return Decision(
        fraction, f"{reserve / GIB:.1f} GiB of {gpu.memory_bytes / GIB:.0f} stay free for activations"
    )


def _reserve_bytes(memory_bytes: int, ranks: int) -> int:
    """What one GPU keeps free, by its size and by how many compute together."""
    for below, reserve in ((35, 2.8 + ranks / 10), (90, 9.5 + ranks / 2), (160, 12 + ranks / 2)):
        if memory_bytes < below * GIB:
            return int(reserve * GIB)
    return 32 * GIB
