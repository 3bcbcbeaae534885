"""Decides how LoRA adapters are served."""

from __future__ import annotations

import json
from collections.abc import Mapping

from runtime.config.plan import AdapterSource, KernelPlan, LoraPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

LEAST_MAX_RANK = 16
# Fused layer -> its sub-layers. In --lora-target-modules, a fused layer includes its sub-layers, and a sub-layer
# includes the fused layer.
_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def lora_plan(builder: PlanBuilder, kernels: KernelPlan) -> LoraPlan:
    """Plan the LoRA adapters. Paths and Hub names of adapters stay as the user gave them.

    If no option sets `max_rank`, it is 0, and the adapters' ranks decide it later.
    """
    args = builder.args.lora
    asked = bool(args.lora_paths) or args.lora_dir is not None
    enabled = asked if args.enable_lora is None else args.enable_lora
    for option in ("lora_paths", "lora_dir"):
        if args.enable_lora is False and builder.args.get(option):
            builder.refuse(option, f"--{option.replace('_', '-')} needs adapters, which --enable-lora false turns off.")
    if enabled and kernels.choices.get("low_rank") != "with_triton" and args.lora_backend in ("triton", "csgmv"):
        builder.refuse("lora_backend", f"--lora-backend {args.lora_backend} needs a GPU with Triton; leave it out.")
    if enabled and kernels.choices.get("low_rank") != "with_cpp" and args.lora_backend == "cpp":
        builder.refuse("lora_backend", "--lora-backend cpp needs a CPU with a C++ compiler; leave it out.")
    if args.max_loaded_loras is not None and args.max_loaded_loras < args.max_loras_per_batch:
        builder.refuse(
            "max_loaded_loras",
            f"--max-loaded-loras {args.max_loaded_loras} is less than the {args.max_loras_per_batch} adapters of a "
            "batch (--max-loras-per-batch).",
        )
    if args.lora_dir is not None and "://" in args.lora_dir and builder.args.parallel.nnodes > 1:
        builder.refuse("lora_dir", "--lora-dir must be a folder that all machines have, not a URL, with --nnodes.")
    return builder.build(
        LoraPlan,
        enabled=Decision(
            enabled, f"adapters are {'' if asked else 'not '}named" if args.enable_lora is None else "as asked"
        ),
        sources=Decision(_sources(builder), "as asked"),
        max_rank=builder.follow_or("max_lora_rank", 0, "that of the adapters"),
        download_dir=builder.follow_or("download_dir", None, "the user's cache"),
        targets=Decision(_targets(builder), "as asked" if args.lora_target_modules else "all layers that can"),
    )


def _sources(builder: PlanBuilder) -> tuple[AdapterSource, ...]:
    sources: dict[str, AdapterSource] = {}
    for text in builder.args.lora.lora_paths or ():
        source = adapter_source(text)
        if source is None:
            builder.refuse(
                "lora_paths",
                f"--lora-paths: {text[:80]} is not a PATH, NAME=PATH or a JSON object with the texts lora_name and "
                "lora_path, and pinned true or false.",
            )
        elif source.name in sources:
            builder.refuse("lora_paths", f"--lora-paths names {source.name} twice.")
        else:
            sources[source.name] = source
    pinned = sum(source.pinned for source in sources.values())
    if pinned >= builder.args.lora.max_loras_per_batch:
        builder.refuse("lora_paths", f"--lora-paths pins {pinned} adapters; one slot must stay free for others.")
    return tuple(sources.values())


def adapter_source(text: str) -> AdapterSource | None:
    """Parse one value of --lora-paths. Return None if it is invalid."""
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=") if "=" in text else (text, "", text)
        return AdapterSource(name=name, path=path) if name and path else None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    # SGLang's names of the fields are "lora_name" and "lora_path", vLLM's are "name" and "path".
    name, path = (values.get(f"lora_{key}", values.get(key)) for key in ("name", "path"))
    pinned = values.get("pinned", False)
    known = {"lora_name", "lora_path", "name", "path", "pinned", "base_model_name"}
    if not (isinstance(name, str) and name and isinstance(path, str) and path and isinstance(pinned, bool)):
        return None
    return AdapterSource(name=name, path=path, pinned=pinned) if values.keys() <= known else None


def _targets(builder: PlanBuilder) -> tuple[str, ...] | None:
    named = builder.args.lora.lora_target_modules
    if not named or named == ("all",):
        return None
    if "all" in named:
        builder.refuse("lora_target_modules", "--lora-target-modules: all must be the only value.")
        return None
    more = [part for fused, parts in _FUSED.items() if fused in named for part in parts]
    more += [fused for fused, parts in _FUSED.items() if any(part in named for part in parts)]
    return tuple(dict.fromkeys((*named, *more)))
