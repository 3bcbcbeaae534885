"""Load and unload LoRA adapters while the server runs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import anyio
import anyio.to_thread

from runtime.actors.adapters import MAX_NAME
from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading.adapter_config import CONFIG
from serve.calls.decode import Length, NotBuilt, decode

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Name = Annotated[str, Length(1, MAX_NAME)]
Folder = Annotated[str, Length(1, 4096)]
DECODED_AT_ONCE = 2**18  # base64 characters decoded per call, which holds the GIL; a multiple of 4


@dataclass(slots=True, kw_only=True)
class LoadAdapterBody:
    """The body of `/load_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_path: Folder  # a folder on the server's machine
    pinned: bool = False  # whether the adapter is never evicted from host memory or from its slot
    added_tokens_config: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class LoadAdapterFromTensorsBody:
    """The body of `/load_lora_adapter_from_tensors`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    config_dict: dict[str, Any]  # the contents of adapter_config.json
    serialized_tensors: str  # base64 of the tensors in the safetensors format, with peft's names
    load_format: Literal["safetensors"] | None = None
    pinned: bool = False
    lora_id: str | None = None  # accepted without effect, since the name identifies the adapter
    added_tokens_config: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class LoadAdapterInPlaceBody:
    """The body of `/v1/load_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_path: Folder
    load_inplace: bool = False  # whether to replace an adapter of the same name
    base_model_name: str | None = None  # accepted without effect, since there is one base model


@dataclass(slots=True, kw_only=True)
class UnloadAdapterBody:
    """The body of `/unload_lora_adapter` and `/v1/unload_lora_adapter`."""

    closed: ClassVar[bool] = True

    lora_name: Name
    lora_int_id: int | None = None  # accepted without effect, since the name identifies the adapter


async def load_adapter(core: EngineCore, name: str, path: str, *, pinned: bool = False, replace: bool = False) -> None:
    """Load an adapter from a folder. Raises `InvalidRequest` with the reason if loading fails.

    Cancelling the caller does not interrupt the load.
    """
    _check_name(core, name)
    if "\0" in path or "://" in path:
        raise InvalidRequest("lora_path must be a folder of this machine.", param="lora_path")
    with anyio.CancelScope(shield=True):
        try:
            await core.adapters.load(name, path, pinned=pinned, replace=replace)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="lora_path") from error


async def load_adapter_from_tensors(
    core: EngineCore, name: str, config: Mapping[str, Any], tensors: bytes, *, pinned: bool = False
) -> None:
    """Load an adapter from its configuration and its tensors in the safetensors format. Raises like `load_adapter`.

    The configuration and the tensors are written to a temporary folder. If the adapter is evicted from memory, it is
    read again from this folder.
    """
    _check_name(core, name)
    if core.plan.parallel.nnodes > 1:
        raise InvalidRequest("With several machines, load the adapter from a folder that all of them have.")
    folder = core.adapters.new_folder(name)
    await anyio.to_thread.run_sync(_write, folder, config, tensors)
    with anyio.CancelScope(shield=True):
        try:
            await core.adapters.load(name, str(folder), pinned=pinned, temporary=True)
        except CheckpointError as error:
            raise InvalidRequest(str(error).replace(str(folder), name), param="serialized_tensors") from error


def tensors_of(json: dict[str, Any]) -> tuple[LoadAdapterFromTensorsBody, bytes]:
    """Return the decoded body and the bytes of its tensors. Raises `InvalidRequest` if the tensors are not base64."""
    body = decode(LoadAdapterFromTensorsBody, json)
    text, decoded = body.serialized_tensors, bytearray()
    try:
        for start in range(0, len(text), DECODED_AT_ONCE):
            decoded += base64.b64decode(text[start : start + DECODED_AT_ONCE], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("serialized_tensors must be base64.", param="serialized_tensors") from error
    body.serialized_tensors = ""
    return body, bytes(decoded)


def _check_name(core: EngineCore, name: str) -> None:
    if name == core.plan.serve.served_model_name:
        raise InvalidRequest(f"{name} is the name of the base model.", param="lora_name")


def _write(folder: Path, config: Mapping[str, Any], tensors: bytes) -> None:
    """Write the files of an adapter. Raises `InvalidRequest` if the tensors are not safetensors data."""
    # Safetensors data begins with 8 bytes that hold the size of the JSON header. The header follows and begins with a
    # brace. This check rejects pickle data, which could run code.
    if tensors[8:9] != b"{" or int.from_bytes(tensors[:8], "little") > len(tensors) - 8:
        raise InvalidRequest(
            "The tensors must be in the safetensors format (safetensors.torch.save); pickle is never read.",
            param="serialized_tensors",
        )
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(tensors)


def adapters_answer(core: EngineCore, error: str = "") -> dict[str, Any]:
    """Return the answer in SGLang's format: success, the error message, and the adapters that are loaded now."""
    loaded = {adapter.name: adapter.path for adapter in core.adapters.adapters}
    return {"success": not error, "error_message": error, "loaded_adapters": loaded}
