"""Load a model that runs transformers' code. The library also reads and converts the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ops.select import Kernels
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError
from runtime.loading.checkpoint import find_weights
from runtime.loading.parameters import check_dtypes
from runtime.loading.tensors import TensorFiles
from runtime.modeling.decoder import Decoder
from runtime.models.by_transformers import attention
from runtime.models.by_transformers.caches import SequenceCacheDecoder
from runtime.models.by_transformers.encoder import TransformersEncoder
from runtime.models.by_transformers.facts import (
    TEXT_ONLY,
    auto_class,
    config_of,
    model_class,
    quiet,
    remove_padding_token,
)
from runtime.models.by_transformers.model import PagedAttention, TransformersDecoder, fix_rope_scaling

DUMMY_SEED = 1234
MAX_NAMED = 20
MULTIMODAL_PARTS = re.compile(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.")


def load_by_transformers(facts: ModelFacts, plan: ModelPlan, kernels: Kernels) -> Decoder:
    """Return the model on plan.device in plan.dtype.

    Raises CheckpointError if tensors are missing, unexpected or have a wrong shape.
    """
    attention.register()
    loader: Any = (model_class if facts.is_encoder else auto_class)(facts.architecture)
    implementation = _implementation(facts)
    config, dtype = config_of(facts.config), getattr(torch, plan.dtype)
    with quiet():
        if plan.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(DUMMY_SEED)
                model = (
                    loader._from_config(config, dtype=dtype)
                    if facts.is_encoder
                    else loader.from_config(config, dtype=dtype, attn_implementation=implementation)
                )
        else:
            model = _read(facts, config, dtype, plan, loader, implementation)
    model = model if facts.is_encoder else attention.causal_lm(model)
    model.eval().requires_grad_(False).to(plan.device)
    fix_rope_scaling(model, plan.context_length)
    if facts.is_encoder:
        return TransformersEncoder(model, len(facts.labels))
    # done after loading, because transformers would otherwise zero the padding token's embedding
    remove_padding_token(model.config)
    if facts.recurrent:
        return SequenceCacheDecoder(model)
    return TransformersDecoder(model, PagedAttention(kernels, facts))


def _implementation(facts: ModelFacts) -> str | None:
    """Return the attention implementation. Falcon needs "sdpa", because its eager code adds ALiBi twice."""
    if facts.is_encoder:
        return None
    if facts.recurrent:
        return "sdpa" if facts.config.get("model_type") == "falcon" else "eager"
    return attention.NAME


def _read(
    facts: ModelFacts,
    config: Any,
    dtype: torch.dtype,
    plan: ModelPlan,
    loader: Any,
    implementation: str | None,
) -> Any:
    files = TensorFiles(find_weights(Path(facts.path), plan.load_format))
    if not plan.any_dtype:
        weights = {name: dtype for name, dtype in files.dtypes.items() if name.endswith(".weight")}
        check_dtypes(weights, files.where)
    try:
        loaded: Any = loader.from_pretrained(
            facts.path,
            config=config,
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
            use_safetensors={"safetensors": True, "pt": False}.get(plan.load_format),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # such tensors are reported below, by name
        )
        model, info = loaded
    except Exception as error:  # transformers raises errors of many types
        raise CheckpointError(f"transformers cannot load {facts.path}: {error}") from error
    if facts.config.get("model_type") in TEXT_ONLY:
        unexpected = info.get("unexpected_keys") or ()
        info["unexpected_keys"] = [name for name in unexpected if not MULTIMODAL_PARTS.match(str(name))]
    problems = [
        f"{len(names)} {problem} ({', '.join(sorted(map(str, names))[:MAX_NAMED])})"
        for problem, key in (
            ("missing", "missing_keys"),
            ("not of this model", "unexpected_keys"),
            ("of the wrong shape", "mismatched_keys"),
        )
        if (names := info.get(key))
    ]
    if problems:
        where = files.where([str(name) for key in info if key.endswith("_keys") for name in info[key] or ()])
        raise CheckpointError(f"The checkpoint does not fit the model: {'; '.join(problems)}{where}.")
    return model
