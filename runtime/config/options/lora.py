"""Options about LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import planned

_LORA_TARGET_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
    "all",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraArgs:
    """LoRA adapters."""

    enable_lora: bool | None = planned(
        None, "Serve LoRA adapters. Default: if --lora-paths names any.", built=(False,)
    )
    lora_paths: tuple[str, ...] | None = planned(
        None,
        "Adapters to load at the start: PATH, NAME=PATH, or a JSON object with lora_name and lora_path.",
        empty=True,
    )
    max_lora_rank: int | None = planned(
        None, "Largest rank of an adapter. Default: that of the adapters in --lora-paths.", low=1
    )
    lora_target_modules: tuple[str, ...] | None = planned(
        None,
        "Layers that adapters may change. Default: those that the adapters in --lora-paths change.",
        choices=_LORA_TARGET_MODULES,
        empty=True,
    )
    max_loras_per_batch: int = planned(
        8, "Adapters that can run in one batch, the plain model counted as one.", low=1
    )
    max_loaded_loras: int | None = planned(None, "Adapters kept in host memory. Default: no limit.", low=1)
    lora_backend: str = planned(
        "triton", "Kernels for adapters.", choices=("triton", "flashinfer", "csgmv", "torch_native", "ascend")
    )
