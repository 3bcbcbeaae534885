"""Options about LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import inert, option

_LORA_TARGET_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
    "embed_tokens", "lm_head", "all",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraArgs:
    """LoRA adapters."""

    enable_lora: bool | None = option(
        None,
        "Serve LoRA adapters. Default: on if --lora-paths or --lora-dir is set.",
        plan="lora.enabled",
    )
    lora_paths: tuple[str, ...] | None = option(
        None,
        "Adapters to load at the start: PATH, NAME=PATH, or a JSON object with lora_name, lora_path and pinned. A PATH "
        "is a folder or a Hub repository.",
        aliases=("--lora-modules",),
        empty=True,
    )
    lora_dir: str | None = option(
        None,
        "Folder of adapters, or its URL (s3://bucket/folder), that are loaded on demand: a request that names a folder "
        "in it gets this adapter. "
        "Default: only loaded adapters can be named.",
        plan="lora.folder",
    )
    max_lora_rank: int | None = option(
        None,
        "Largest rank of an adapter. Memory of the slots grows with it. Default: the largest of --lora-paths, and at "
        "least 16.",
        low=1,
        high=1024,
        plan="lora.max_rank",
    )
    lora_target_modules: tuple[str, ...] | None = option(
        None,
        "Layers that adapters may change. Default: all linear layers, the embedding and the LM head.",
        choices=_LORA_TARGET_MODULES,
        empty=True,
        sglang="those of --lora-paths",
    )
    max_loras_per_batch: int = option(
        8,
        "Adapters that can run in one batch, each in a slot of the device. Requests without an adapter need no slot.",
        aliases=("--max-loras",),
        low=1,
        high=1024,
        plan="lora.max_slots",
    )
    max_loaded_loras: int | None = option(
        None,
        "Adapters kept in host memory; others are read again when a request names them. Default: no limit.",
        aliases=("--max-cpu-loras",),
        low=1,
        plan="lora.max_loaded",
    )
    lora_eviction_policy: str = option(
        "lru", "Adapter that leaves its slot for another one: unused for longest, or placed first.",
        choices=("lru", "fifo"),
    )  # fmt: skip
    lora_backend: str | None = option(
        None,
        "Kernels for adapters. Default: those of the other small operations. triton and csgmv are one kernel here.",
        choices=("triton", "csgmv", "torch_native", "cpp", "flashinfer", "ascend"),
        built=(None, "triton", "csgmv", "torch_native", "cpp"),
        needs={"flashinfer": "the flashinfer package and an NVIDIA GPU", "ascend": "an Ascend accelerator"},
        sglang="triton",
    )
    max_lora_chunk_size: int | None = inert(
        None, "Tokens that a kernel takes together.", choices=(16, 32, 64, 128), reason="the kernels choose their tiles"
    )
