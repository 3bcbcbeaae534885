"""Handlers that show, attach, detach and clear the KV cache's storage backend while the server runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from runtime.actors.storage import Attachment
from runtime.errors import ConfigurationError, InvalidRequest
from serve.calls.body import parse_object
from serve.http.endpoint import decodes, json_response, read_as

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageBody:
    """The body of `PUT /hicache/storage-backend`."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None  # settings as the text of a JSON object
    hicache_storage_backend_extra_config: dict[str, Any] | None = None  # the same settings as an object


async def clear_storage(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Remove all pages of this model from the storage backend. Pages on the device and in host memory stay."""
    await core.clear_storage()
    return PlainTextResponse("Hierarchical cache storage backend cleared.\n")


async def show(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the attached storage backend, and counts of pages in the host tier and in the storage."""
    attachment, status = core.attachment, core.status()
    return json_response(
        {
            "hicache_storage_backend": None if attachment is None else attachment.backend,
            "hicache_storage_prefetch_policy": core.plan.cache.prefetch_policy,
            "host_tier": status.host_tier._asdict(),
            "storage": status.storage._asdict(),
        }
    )


@decodes(StorageBody)
async def attach(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Attach a storage backend.

    A body that names a folder or a class is refused, unless its settings are those of the command line.
    """
    body = await read_as(http, StorageBody)
    config = dict(body.hicache_storage_backend_extra_config or {})
    if body.hicache_storage_backend_extra_config_json:
        try:
            config = parse_object(body.hicache_storage_backend_extra_config_json.encode())
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(
                "It must be the text of a JSON object.", param="hicache_storage_backend_extra_config_json"
            ) from error
    try:
        await core.attach_storage(Attachment(body.hicache_storage_backend, config))
    except ConfigurationError as error:
        raise InvalidRequest(str(error), param="hicache_storage_backend") from error
    return json_response({"hicache_storage_backend": body.hicache_storage_backend})


async def detach(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Detach the storage backend, and keep its pages. Answers 200 even if none is attached."""
    await core.detach_storage()
    return json_response({"hicache_storage_backend": None})
