"""Options about further tiers of the KV cache: host memory and storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from runtime.config.option_spec import Json, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyArgs:
    """KV cache in host memory and storage."""

    enable_hierarchical_cache: Annotated[
        bool,
        planned(
            "Keep prefixes that no longer fit on the device in host memory and bring them back when needed."
        ),
    ] = False
    hicache_ratio: Annotated[
        float, planned("Size of the host tier as a multiple of the device's KV cache; more than 1.", above=0)
    ] = 2.0
    hicache_size: Annotated[
        int,
        planned("Size of the host tier in gigabytes for each rank; 0 leaves it to --hicache-ratio.", low=0),
    ] = 0
    hicache_write_policy: Annotated[
        str,
        planned(
            "When pages are copied to the host: at the first use (write_through), at the second "
            "(write_through_selective), or when the device evicts them (write_back).",
            choices=("write_back", "write_through", "write_through_selective"),
        ),
    ] = "write_through"
    hicache_io_backend: Annotated[
        str,
        planned(
            "How pages move between device and host: by copies (direct) or by a kernel.",
            choices=("direct", "kernel"),
        ),
    ] = "kernel"
    hicache_mem_layout: Annotated[
        str,
        planned(
            "Order of the host tier in memory: layer by layer or page by page.",
            choices=("layer_first", "page_first", "page_first_direct"),
        ),
    ] = "layer_first"
    hicache_storage_backend: Annotated[
        str | None,
        planned(
            "Storage behind the host tier: files on disk, or a service. Default: none.",
            choices=("file", "mooncake", "hf3fs", "nixl"),
        ),
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        str,
        planned(
            "How long a request waits for pages from storage: not at all (best_effort), for all of them "
            "(wait_complete), or up to a limit (timeout).",
            choices=("best_effort", "wait_complete", "timeout"),
        ),
    ] = "best_effort"
    hicache_storage_backend_extra_config: Annotated[
        Json, planned("JSON object with settings of the storage backend.")
    ] = field(default_factory=dict)
    enable_lmcache: Annotated[bool, planned("Use the LMCache package as the store of prefixes.")] = False
