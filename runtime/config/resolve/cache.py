"""The cache's section of the plan."""

from __future__ import annotations

from ops.machine import GIB, Gpu
from runtime.config.plan import CachePlan
from runtime.config.resolve.plan_builder import PlanBuilder

PAGE_SIZE = 16
MODEST_SHARE = 0.3
FLOAT8 = {"fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
E4M3_CAPABILITY = (8, 9)  # below it Triton has no e4m3


def chosen_page_size(builder: PlanBuilder) -> int:
    asked = builder.args.cache.page_size
    if asked is not None:
        return builder.decide("cache.page_size", asked, "as asked")
    why = "pages of 16 are read faster than single tokens, and cut little off shared prefixes"
    return builder.decide("cache.page_size", PAGE_SIZE, why)


def cache_plan(builder: PlanBuilder, gpu: Gpu | None, dtype: str, page_size: int) -> CachePlan:
    args = builder.args.cache
    fraction, modest = _mem_fraction(builder, gpu)
    cap = args.max_total_tokens
    if cap is not None and cap < page_size:
        builder.refuse(
            "max_total_tokens", f"--max-total-tokens {cap} is less than one page of {page_size} tokens."
        )
    return CachePlan(
        page_size=page_size,
        prefix_cache=builder.take("cache.prefix_cache", "disable_radix_cache", not args.disable_radix_cache),
        kv_dtype=_kv_dtype(builder, gpu, dtype),
        mem_fraction=fraction,
        modest=modest,
        max_total_tokens=builder.take("cache.max_total_tokens", "max_total_tokens"),
    )


def _kv_dtype(builder: PlanBuilder, gpu: Gpu | None, dtype: str) -> str:
    asked = builder.args.cache.kv_cache_dtype
    if asked == "auto":
        return builder.decide("cache.kv_dtype", dtype, "that of the model")
    if asked == "fp8_e4m3" and gpu is not None and gpu.capability < E4M3_CAPABILITY:
        builder.refuse(
            "kv_cache_dtype",
            f"--kv-cache-dtype {asked} needs compute capability 8.9 or newer, and {gpu.name} has "
            f"{gpu.capability[0]}.{gpu.capability[1]}; use fp8_e5m2.",
        )
        return dtype
    return builder.decide("cache.kv_dtype", FLOAT8.get(asked, asked), "as asked")


def _mem_fraction(builder: PlanBuilder, gpu: Gpu | None) -> tuple[float, bool]:
    place = "cache.mem_fraction"
    asked = builder.args.cache.mem_fraction_static
    modest = asked is None and gpu is None
    builder.decide("cache.modest", modest, "only without a GPU, and if no fraction was asked for")
    if asked is not None:
        return builder.decide(place, asked, "as asked, of all memory"), modest
    if gpu is None:
        why = "of the memory that is free once the weights are loaded; the rest stays for other programs"
        return builder.decide(place, MODEST_SHARE, why), modest
    parallel = builder.args.parallel
    reserve = _reserve_bytes(gpu.memory_bytes, parallel.tp_size * parallel.pp_size)
    fraction = max(0.05, round(1 - reserve / gpu.memory_bytes, 3))
    why = f"{reserve / GIB:.1f} GiB of {gpu.memory_bytes / GIB:.0f} stay free for activations"
    return builder.decide(place, fraction, why), modest


def _reserve_bytes(memory_bytes: int, ranks: int) -> int:
    """What one GPU keeps free, by its size and by how many compute together."""
    for below, reserve in ((35, 2.8 + ranks / 10), (90, 9.5 + ranks / 2), (160, 12 + ranks / 2)):
        if memory_bytes < below * GIB:
            return int(reserve * GIB)
    return 32 * GIB
