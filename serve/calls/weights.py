"""Replace the loaded weights by the weights of another checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from serve.calls.decode import Length, NotBuilt

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class WeightsFromDiskBody:
    """The body of `/update_weights_from_disk`."""

    closed: ClassVar[bool] = True

    model_path: Annotated[str, Length(1, 4096)]  # a folder on the server's machine
    load_format: Annotated[str, Length(1, 100)] | None = None  # None: the server's load format
    flush_cache: bool = True  # whether to recompute running requests and empty the prefix cache
    abort_all_requests: bool = False
    weight_version: Annotated[str, Length(1, 1024)] | None = None  # None: the version stays unchanged
    is_async: NotBuilt = None
    torch_empty_cache: NotBuilt = None
    keep_pause: NotBuilt = None


async def update_weights_from_disk(core: EngineCore, body: WeightsFromDiskBody) -> dict[str, Any]:
    """Replace the weights, and return the answer. Raises the errors of `EngineCore.update_weights`."""
    num_requests = await core.update_weights(
        body.model_path,
        body.load_format,
        flush_cache=body.flush_cache,
        abort_all=body.abort_all_requests,
        version=body.weight_version,
    )
    message = "The weights were replaced."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    return {"success": True, "message": message, "num_paused_requests": num_requests}
