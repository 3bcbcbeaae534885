"""Reading a configuration's rotary embedding in either spelling. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import CheckpointError
from runtime.layers.rope_parameters import KINDS, RopeParameters
from runtime.models.fields import Fields

_RENAMED = {"su": "longrope", "mrope": "default"}
NUM_AXES = 3


def rope_parameters(config: Fields, head_dim: int, layer_type: str | None = None) -> RopeParameters:
    """The rotary embedding of a layer type.

    Newer files hold everything in `rope_parameters`, flat or one object per layer type; older ones have
    `rope_theta` and `partial_rotary_factor` beside `rope_scaling`. Raises CheckpointError naming a wrong
    field.
    """
    rope = _fields(config, layer_type)
    kind = rope.choice("rope_type", [*KINDS, *_RENAMED], default="default")
    kind = _RENAMED.get(kind, kind)
    if kind == "yarn" and rope.values.get("short_factor") is not None:
        kind = "longrope"  # as the first Phi-3 checkpoints called it
    max_position = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings") or rope.optional_integer(
        "original_max_position_embeddings"
    )
    partial = rope.optional_number("partial_rotary_factor") or 1.0
    dim = int(head_dim * partial)
    if partial > 1 or dim % 2 or dim == 0:
        raise CheckpointError(
            f"config.json: head_dim {head_dim} with partial_rotary_factor {partial:g} leaves no even number of "
            "dimensions to rotate."
        )
    return RopeParameters(
        theta=rope.optional_number("rope_theta") or 10000.0,
        dim=dim,
        max_position=max_position,
        kind=kind,
        original_context=original or 0,
        sections=_sections(rope, dim),
        **_scaling(rope, kind, dim, max_position / original if original else None),
    )


def _sections(rope: Fields, dim: int) -> tuple[int, ...]:
    """How many pairs of dimensions turn with each axis of a position, where positions have several."""
    sections = rope.values.get("mrope_section")
    if sections is None:
        return ()
    numbers = isinstance(sections, list) and all(type(each) is int and each >= 0 for each in sections)
    if not numbers or len(sections) != NUM_AXES or sum(sections) != dim // 2:
        raise rope.wrong("mrope_section", f"{NUM_AXES} whole numbers with the sum {dim // 2}")
    return tuple(sections)


def _fields(config: Fields, layer_type: str | None) -> Fields:
    rope = config.child("rope_parameters")
    if layer_type is not None and layer_type in rope.values:
        rope = rope.child(layer_type)
    scaling = config.child("rope_scaling")
    place = scaling.place if scaling.values else rope.place
    values = {name: config.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    values.update(rope.values)
    values.update(scaling.values)
    if values.get("rope_type") is None:
        values["rope_type"] = values.get("type")
    return Fields(values, place)


def _scaling(rope: Fields, kind: str, dim: int, ratio: float | None) -> Mapping[str, Any]:
    """What the scaling of this kind needs; `ratio` is the factor that the context lengths imply."""
    match kind:
        case "linear" | "dynamic":
            return {"factor": rope.number("factor")}
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise rope.wrong("low_freq_factor", f"below high_freq_factor ({high:g})")
            return {"factor": rope.number("factor"), "low_freq_factor": low, "high_freq_factor": high}
        case "yarn":
            return {
                "factor": rope.optional_number("factor") or ratio or rope.number("factor"),
                "attention_factor": rope.optional_number("attention_factor"),
                "beta_fast": rope.optional_number("beta_fast") or 32.0,
                "beta_slow": rope.optional_number("beta_slow") or 1.0,
                "mscale": rope.optional_number("mscale", above=-1.0) or 0.0,
                "mscale_all_dim": rope.optional_number("mscale_all_dim", above=-1.0) or 0.0,
                "truncate": rope.flag("truncate", default=True),
            }
        case "longrope":
            return {
                "factor": rope.optional_number("factor") or ratio or rope.number("factor"),
                "attention_factor": rope.optional_number("attention_factor"),
                "short_factor": rope.numbers("short_factor", dim // 2),
                "long_factor": rope.numbers("long_factor", dim // 2),
            }
        case _:
            return {}
