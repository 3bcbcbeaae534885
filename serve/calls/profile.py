"""The body of `/start_profile`: which steps are profiled, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from runtime.errors import InvalidRequest
from runtime.profile import MAX_STEPS, ProfileOptions, profile_path
from serve.calls.decode import Length, NotBuilt, Range

Activity = Literal["CPU", "GPU", "MEM"]


@dataclass(slots=True, kw_only=True)
class ProfileBody:
    """The body of `/start_profile`, which may be absent. Profiling stops by itself after `num_steps` steps."""

    closed: ClassVar[bool] = True

    output_dir: Annotated[str, Length(1, 1024)] | None = None  # a subfolder of the server's profile folder
    num_steps: Annotated[int, Range(1, MAX_STEPS)] = MAX_STEPS
    activities: Annotated[list[Activity], Length(1, 8)] | None = None  # None: CPU and GPU
    with_stack: bool = False
    record_shapes: bool = False
    profile_prefix: Annotated[str, Length(1, 100)] | None = None  # prefix of the file's name
    start_step: NotBuilt = None
    profile_by_stage: NotBuilt = None
    merge_profiles: NotBuilt = None


def profile_options(body: ProfileBody) -> ProfileOptions:
    """Return the profiler's options, and create the output folder. Call it in a thread, because it writes to disk.

    Raises `InvalidRequest`, whose `param` is the invalid field.
    """
    if body.profile_prefix is not None and not body.profile_prefix.replace("-", "").replace("_", "").isalnum():
        raise InvalidRequest("profile_prefix must consist of letters, digits, - and _.", param="profile_prefix")
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
