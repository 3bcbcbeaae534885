"""Load and unload LoRA adapters while the server runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import anyio

from runtime.actors.adapters import MAX_NAME
from runtime.errors import CheckpointError, InvalidRequest
from serve.calls.decode import Length, NotBuilt

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Name = Annotated[str, Length(1, MAX_NAME)]
Folder = Annotated[str, Length(1, 4096)]


@dataclass(slots=True, kw_only=True)
class LoadAdapterBody:
    """The body of `/load_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_path: Folder  # a folder on the server's machine
    pinned: bool = False  # whether the adapter keeps its place in host memory and its slot
    added_tokens_config: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class LoadAdapterInPlaceBody:
    """The body of `/v1/load_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_path: Folder
    load_inplace: bool = False  # whether the name may be in use; it then means the new adapter
    base_model_name: str | None = None  # accepted without effect, since there is one base model


@dataclass(slots=True, kw_only=True)
class UnloadAdapterBody:
    """The body of `/unload_lora_adapter` and `/v1/unload_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_int_id: int | None = None  # accepted without effect, since the name identifies the adapter


async def load_adapter(core: EngineCore, name: str, path: str, *, pinned: bool = False, replace: bool = False) -> None:
    """Load an adapter. Raises `InvalidRequest`, with the reason, if this fails. Cancellation does not interrupt it."""
    if name == core.plan.serve.served_model_name:
        raise InvalidRequest(f"{name} is the name of the base model.", param="lora_name")
    if "\0" in path or "://" in path:
        raise InvalidRequest("lora_path must be a folder of this machine.", param="lora_path")
    with anyio.CancelScope(shield=True):
        try:
            await core.adapters.load(name, path, pinned=pinned, replace=replace)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="lora_path") from error


def adapters_answer(core: EngineCore, error: str = "") -> dict[str, Any]:
    """Return SGLang's answer: whether the call succeeded, and the adapters that are loaded now."""
    loaded = {adapter.name: adapter.path for adapter in core.adapters.adapters}
    return {"success": not error, "error_message": error, "loaded_adapters": loaded}
