"""Options about LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import planned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraArgs:
    """LoRA adapters."""

    enable_lora: Annotated[
        bool | None, planned("Serve LoRA adapters. Default: if --lora-paths names any.", built=(False,))
    ] = None
    lora_paths: Annotated[
        tuple[str, ...] | None,
        planned(
            "Adapters to load at the start: PATH, NAME=PATH, or a JSON object with lora_name and lora_path.",
            empty=True,
        ),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        planned("Largest rank of an adapter. Default: that of the adapters in --lora-paths.", low=1),
    ] = None
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        planned(
            "Layers that adapters may change. Default: those that the adapters in --lora-paths change.",
            choices=(
                "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
                "gate_up_proj", "all",
            ),
            empty=True,
        ),
    ] = None  # fmt: skip
    max_loras_per_batch: Annotated[
        int, planned("Adapters that can run in one batch, the plain model counted as one.", low=1)
    ] = 8
    max_loaded_loras: Annotated[
        int | None, planned("Adapters kept in host memory. Default: no limit.", low=1)
    ] = None
    lora_backend: Annotated[
        str,
        planned("Kernels for adapters.", choices=("triton", "flashinfer", "csgmv", "torch_native", "ascend")),
    ] = "triton"
