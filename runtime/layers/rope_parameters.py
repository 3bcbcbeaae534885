"""The parameters of rotary position embedding, read from a model's configuration. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config.fields import Fields
from runtime.errors import CheckpointError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
RENAMED = {"su": "longrope", "mrope": "default"}
NUM_AXES = 3  # time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """The base of the angles, and their scaling beyond the trained context."""

    theta: float
    dim: int  # number of dimensions that are rotated, at the start of each head
    max_position: int  # max_position_embeddings
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # length of the trained context; 0: it equals `max_position`
    attention_factor: float | None = None  # multiplies cosines and sines (yarn and longrope); None: computed
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    sections: tuple[int, ...] = ()  # number of pairs per position axis; (): positions have one axis
    sections_interleaved: bool = False  # whether the pairs of the three axes alternate

    @property
    def trained_context(self) -> int:
        return self.original_context or self.max_position

    @property
    def context_length(self) -> int:
        """Context length that these parameters support.

        For "linear" and "yarn" without an original context length it is `max_position` * `factor`, otherwise
        `max_position`.
        """
        if self.kind in ("linear", "yarn") and not self.original_context:
            return int(self.max_position * self.factor)
        return self.max_position

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The position axis (0: time, 1: height, 2: width) of each pair; () if positions have one axis.

        If sections are interleaved, pairs 1, 4, 7, ... rotate with the height and pairs 2, 5, 8, ... with the width,
        until each axis has as many pairs as its section says (Qwen3-VL, transformers' `apply_interleaved_mrope`).
        """
        if self.sections and self.sections_interleaved:
            return tuple(
                pair % NUM_AXES if pair < NUM_AXES * self.sections[pair % NUM_AXES] else 0
                for pair in range(self.dim // 2)
            )
        return tuple(axis for axis, pairs in enumerate(self.sections) for _ in range(pairs))


def read_rope_parameters(config: Fields, head_dim: int, layer_type: str | None = None) -> RopeParameters:
    """Return the rope parameters of a layer type, or of all layers if `layer_type` is None.

    Newer files hold all values in `rope_parameters`, flat or one object per layer type. Older files have `rope_theta`
    and `partial_rotary_factor` next to `rope_scaling`. Raises CheckpointError, which names the invalid field.
    """
    rope = _fields(config, layer_type)
    kind = rope.choice("rope_type", [*KINDS, *RENAMED], default="default")
    kind = RENAMED.get(kind, kind)
    if kind == "yarn" and rope.values.get("short_factor") is not None:
        kind = "longrope"  # the first Phi-3 checkpoints call it "yarn"
    max_position = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings") or rope.optional_integer(
        "original_max_position_embeddings"
    )
    partial = rope.optional_number("partial_rotary_factor") or 1.0
    dim = int(head_dim * partial)
    if partial > 1 or dim % 2 or dim == 0:
        raise CheckpointError(
            f"config.json: head_dim {head_dim} with partial_rotary_factor {partial:g} does not give a positive "
            "even number of dimensions to rotate."
        )
    return RopeParameters(
        theta=rope.optional_number("rope_theta") or 10000.0,
        dim=dim,
        max_position=max_position,
        kind=kind,
        original_context=original or 0,
        sections=_sections(rope, dim),
        sections_interleaved=rope.flag("mrope_interleaved"),
        **_scaling(rope, kind, dim, max_position / original if original else None),
    )


def _sections(rope: Fields, dim: int) -> tuple[int, ...]:
    """Return the number of pairs that rotate with each position axis, or () if positions have one axis."""
    sections = rope.values.get("mrope_section")
    if sections is None:
        return ()
    numbers = isinstance(sections, list) and all(type(each) is int and each >= 0 for each in sections)
    if not numbers or len(sections) != NUM_AXES or sum(sections) != dim // 2:
        raise rope.wrong("mrope_section", f"{NUM_AXES} non-negative integers with the sum {dim // 2}")
    return tuple(sections)


def _fields(config: Fields, layer_type: str | None) -> Fields:
    rope = config.child("rope_parameters")
    if layer_type is not None and layer_type in rope.values:
        rope = rope.child(layer_type)
    scaling = config.child("rope_scaling")
    path = scaling.path if scaling.values else rope.path
    values = {name: config.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    values.update(rope.values)
    values.update(scaling.values)
    if values.get("rope_type") is None:
        values["rope_type"] = values.get("type")
    return Fields(values, path)


def _scaling(rope: Fields, kind: str, dim: int, ratio: float | None) -> Mapping[str, Any]:
    """Return the fields of this kind of scaling. `ratio` is the factor implied by the context lengths."""
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
