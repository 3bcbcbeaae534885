"""Options about separate servers for prompts (prefill) and output (decode)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import planned


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationArgs:
    """Separate prefill and decode servers."""

    disaggregation_mode: Annotated[
        str,
        planned(
            "Part of this server: everything (null), prompts only (prefill) or output only (decode).",
            choices=("null", "prefill", "decode"),
        ),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str,
        planned(
            "What carries the KV cache from one server to the other; fake carries nothing, for tests.",
            choices=("mooncake", "nixl", "ascend", "fake"),
        ),
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int, planned("Port at which a prefill server can be found by decode servers.", low=1, high=65535)
    ] = 8998
    disaggregation_decode_tp: Annotated[
        int | None, planned("Tensor parallelism of the decode servers. Default: that of this server.", low=1)
    ] = None
    disaggregation_decode_dp: Annotated[
        int | None, planned("Data parallelism of the decode servers. Default: that of this server.", low=1)
    ] = None
    disaggregation_prefill_pp: Annotated[
        int, planned("Pipeline parallelism of the prefill servers.", low=1)
    ] = 1
    disaggregation_ib_device: Annotated[
        str | None, planned("InfiniBand devices that carry the KV cache, separated by commas.")
    ] = None
    disaggregation_decode_polling_interval: Annotated[
        int, planned("Steps between two looks at arriving KV caches on a decode server.", low=1)
    ] = 1
    num_reserved_decode_tokens: Annotated[
        int, planned("Tokens that a decode server keeps free for every running request.", low=0)
    ] = 512
