"""The messages to a scheduler actor, and its pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from runtime.actors.live_requests import LiveRequest
from runtime.errors import EngineFailure


class Admit(NamedTuple):
    """A new request with its sequences."""

    live: LiveRequest


class Abort(NamedTuple):
    """End all choices of a request. A final delta is sent for each choice."""

    live: LiveRequest


class EndChoice(NamedTuple):
    """End a choice whose text contains a stop string. No further delta follows."""

    live: LiveRequest
    index: int


class GiveBack(NamedTuple):
    """Remove a request that has not run yet, and call `to` with it."""

    live: LiveRequest
    to: Callable[[LiveRequest], None]


class Wake(NamedTuple):
    """Wake the actor, for example because the late grammar mask of a sequence that is in no step has arrived."""


WAKE = Wake()


@dataclass(slots=True, eq=False)
class Pause:
    """A period without steps. The caller of `paused` sets the fields that decide what happens at its end."""

    reached: asyncio.Future[None]  # resolved when no step is in flight
    weights_changed: bool = False
    checkpoint: str | None = None  # path of the new weights, or None if they have no known path
    recompute: bool = False  # whether the prefix tree is emptied and all sequences are recomputed at the end
    # If not None, the replica is unusable, and fails with this error at the end of the pause.
    failure: EngineFailure | None = None
