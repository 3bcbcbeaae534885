"""Decides whether images, videos and audio are accepted in requests, and their limits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ops.machine import Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import MediaPlan, ModelPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
ENCODERS = ("vision_config", "audio_config")  # fields of config.json that describe an encoder
GIB = 2**30
KINDS = ("image", "video", "audio")


def media_plan(builder: PlanBuilder, machine: Machine, facts: ModelFacts, model: ModelPlan) -> MediaPlan:
    """Plan media in requests. Refuse --enable-multimodal if the model or the machine does not support it."""
    args = builder.args.media
    obstacle = _obstacle(facts, model)
    if args.enable_multimodal and obstacle and facts.architecture:
        builder.refuse("enable_multimodal", f"--enable-multimodal: {obstacle}.")
    enabled = not obstacle and args.enable_multimodal is not False
    refusal = obstacle or ("" if enabled else "the server was started with --enable-multimodal false")
    reason = "as asked" if args.enable_multimodal is not None else obstacle or "the model has an encoder for them"
    return builder.build(
        MediaPlan,
        enabled=Decision(enabled, reason),
        refusal=Decision(refusal, reason),
        required=Decision(enabled and args.enable_multimodal is True, reason),
        limits=Decision(_limits(builder), "as asked" if builder.args.changed("limit_mm_per_prompt") else "the default"),
        domains=Decision(tuple(each.lower() for each in args.allowed_media_domains or ()), "as asked"),
        num_threads=builder.follow_or(
            "mm_threads", 1 if machine.num_cpus < 4 else 2, f"the machine has {machine.num_cpus} CPUs"
        ),
        cache_bytes=builder.follow("mm_cache_gib", int(args.mm_cache_gib * GIB)),
    )


def _obstacle(facts: ModelFacts, model: ModelPlan) -> str:
    """Return why the model cannot take images, videos or audio, or ""."""
    if isinstance(facts.config.get("vq_config"), dict):
        return "the encoder of this model turns images into token ids, which is not supported"
    if not any(isinstance(facts.config.get(part), dict) for part in ENCODERS):
        return "this model has no encoder for images, videos or audio"
    if facts.is_encoder or model.is_embedding:
        return "media cannot be embedded yet"
    if not any((Path(facts.path) / name).is_file() for name in PROCESSOR_FILES):
        return f"the checkpoint has no processor ({' or '.join(PROCESSOR_FILES)})"
    if model.load_format == "dummy":
        return "random weights (--load-format dummy) have no encoder"
    if find_spec("PIL") is None:
        return "Pillow is not installed (pip install 'penstock[media]')"
    return ""


def _limits(builder: PlanBuilder) -> dict[str, int]:
    limits = dict(MediaPlan().limits)
    for kind, most in builder.args.media.limit_mm_per_prompt.items():
        if kind not in KINDS or not isinstance(most, int) or isinstance(most, bool) or most < 0:
            builder.refuse("limit_mm_per_prompt", '--limit-mm-per-prompt must be a JSON object such as {"image": 4}.')
        else:
            limits[kind] = most
    return limits
