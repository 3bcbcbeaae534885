"""The content of `/get_server_info` and `Engine.get_server_info`: resolved settings (`Plan`), and engine state."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from runtime.config import in_its_words, options
from serve.calls.media import takes_kind

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.config.plan import Plan


def info_of(core: EngineCore, version: str) -> dict[str, Any]:
    """Return the resolved settings as one flat object, and the state of the engine, without secrets.

    All values are JSON values. `version` is Penstock's version.
    """
    status = core.status()
    plan = core.plan
    state = {
        **_public(status),
        "last_gen_throughput": status.gen_throughput,
        "load": status.num_used_tokens,
        "memory_usage": {"token_capacity": status.max_total_tokens},
        "dp_size": plan.parallel.dp_size,
        "effective_max_running_requests_per_dp": plan.scheduler.max_running,
    }
    return {
        **by_option(plan),
        **_flattened(plan),
        "status": status.state,
        "has_image_understanding": takes_kind(core, "image"),
        "has_video_understanding": takes_kind(core, "video"),
        "has_audio_understanding": takes_kind(core, "audio"),
        "max_total_num_tokens": status.max_total_tokens,
        "max_req_input_len": core.plan.model.context_length - 1,
        "internal_states": [state],
        "version": version,
    }


def vllm_config(core: EngineCore) -> dict[str, Any]:
    """Return the parts of vLLM's configuration that its clients read: model, parallelism, weight transfer."""
    model, parallel = core.plan.model, core.plan.parallel
    return {
        "model_config": {
            "model": model.path,
            "dtype": model.dtype,
            "max_model_len": model.context_length,
            "quantization": model.quantization,
            "seed": model.random_seed,
        },
        "parallel_config": {
            "tensor_parallel_size": parallel.tp_size,
            "pipeline_parallel_size": parallel.pp_size,
            "data_parallel_size": parallel.dp_size,
        },
        "weight_transfer_config": {"backend": "gloo" if model.device == "cpu" else "nccl"},
    }


def by_option(plan: Plan) -> dict[str, Any]:
    """Map option names, for example `max_running_requests`, to the resolved values, as SGLang's clients expect.

    An option is left out if the plan has no value that corresponds to it.
    """
    values = {}
    for option in options():
        if option.spec.plan and not option.spec.secret:
            with suppress(LookupError):
                values[option.name] = _as_json(in_its_words(option, plan.decision(option.spec.plan)[0]))
    return values


def _flattened(plan: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section in dataclasses.fields(plan):
        value = getattr(plan, section.name)
        if dataclasses.is_dataclass(value):
            flat |= {
                "model_path" if (section.name, name) == ("model", "path") else name: item
                for name, item in _public(value).items()
            }
    return flat


def _public(section: Any) -> dict[str, Any]:
    """Convert a dataclass to JSON values. Fields excluded from its repr are secrets, and are left out."""
    return {field.name: _as_json(getattr(section, field.name)) for field in dataclasses.fields(section) if field.repr}


def _as_json(value: Any) -> Any:
    return (
        value if isinstance(value, str | int | float | bool | None) else orjson.loads(orjson.dumps(value, default=str))
    )
