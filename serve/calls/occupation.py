"""Bodies of the calls that pause generation or release memory, and functions that carry out these calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from runtime.actors.generation_pause import Mode
from runtime.actors.weight_control import TAGS
from runtime.errors import InvalidRequest
from serve.calls.decode import Length, Range

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Tags = Annotated[list[Annotated[str, Length(1, 64)]], Length(0, 16)]


@dataclass(slots=True, kw_only=True)
class MemoryBody:
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Tags | None = None  # "weights", "kv_cache"; None: both


@dataclass(slots=True, kw_only=True)
class PauseBody:
    """The body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass(slots=True, kw_only=True)
class ContinueBody:
    """The body of `/continue_generation`."""


@dataclass(slots=True, kw_only=True)
class SlowDownBody:
    """The body of `/slow_down`."""

    forward_sleep_time: Annotated[float, Range(0, 60)] | None = None  # seconds before each step; None: no delay


def tags_of(tags: Sequence[str] | None) -> tuple[str, ...]:
    """Return the kinds of memory that `tags` names, or all kinds if `tags` is empty or None.

    "cuda_graph" is accepted and ignored, because graphs hold no memory here. Raises `InvalidRequest` for unknown tags.
    """
    if not tags:
        return TAGS
    for tag in tags:
        if tag not in (*TAGS, "cuda_graph"):
            raise InvalidRequest(f"tags must be weights, kv_cache or both, not {tag}.", param="tags")
    return tuple(tag for tag in TAGS if tag in tags)


async def pause(core: EngineCore, mode: Mode) -> None:
    """Pause generation. Raises `EngineClosed` if the engine has ended."""
    await core.pause.begin(mode)


async def resume(core: EngineCore) -> None:
    """Resume generation. Raises `CheckpointError` if a weight update did not send all tensors of a layer."""
    try:
        await core.weights.drop_waiting()
    finally:
        await core.pause.end()
