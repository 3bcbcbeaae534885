"""`/start_profile` and `/stop_profile`: a Chrome trace of the running steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.profile import MAX_STEPS, ProfileOptions, profile_path
from serve.decode import Length, NotBuilt, Range, decode
from serve.endpoint import parse_object, read_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Activity = Literal["CPU", "GPU", "MEM"]


@dataclass(slots=True, kw_only=True)
class ProfileBody:
    """The body of `/start_profile`, which may be absent. The profile ends by itself after `num_steps` steps."""

    closed: ClassVar[bool] = True

    output_dir: Annotated[str, Length(1, 1024)] | None = None  # within the server's folder of profiles
    num_steps: Annotated[int, Range(1, MAX_STEPS)] = MAX_STEPS
    activities: Annotated[list[Activity], Length(1, 8)] | None = None  # CPU and GPU
    with_stack: bool = False
    record_shapes: bool = False
    profile_prefix: Annotated[str, Length(1, 100)] | None = None  # of the file's name
    start_step: NotBuilt = None
    profile_by_stage: NotBuilt = None
    merge_profiles: NotBuilt = None


def profile_options(body: ProfileBody) -> ProfileOptions:
    """Raises `InvalidRequest` naming the field that is wrong. Makes the folder: not for the event loop."""
    if (
        body.profile_prefix is not None
        and not body.profile_prefix.replace("-", "").replace("_", "").isalnum()
    ):
        raise InvalidRequest("profile_prefix must be letters, digits, - and _.", param="profile_prefix")
    activities = body.activities or ["CPU", "GPU"]
    return ProfileOptions(
        path=profile_path(body.output_dir, body.profile_prefix),
        num_steps=body.num_steps,
        cpu="CPU" in activities or "MEM" in activities,
        gpu="GPU" in activities,
        with_stack=body.with_stack,
        record_shapes=body.record_shapes,
        memory="MEM" in activities,
    )


async def start(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Profile the next steps: a Chrome trace of torch's operations and of the CPU graph's or a GPU's kernels."""
    has_body = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
    body = ProfileBody()
    if has_body:
        body = await read_body(http, lambda raw: decode(ProfileBody, parse_object(raw)))
    await core.start_profile(await anyio.to_thread.run_sync(profile_options, body))
    return PlainTextResponse("Start profiling.\n")


async def stop(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """End the profile; answers when it is written, with its path on the server."""
    return PlainTextResponse(f"Stop profiling. The profile is in {await core.stop_profile()}\n")
