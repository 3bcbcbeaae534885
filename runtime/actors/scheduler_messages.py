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
    """End all choices of a request. Each choice gets a last delta."""

    live: LiveRequest


class EndChoice(NamedTuple):
    """End a choice whose text contains a stop string. No further delta follows."""

    live: LiveRequest
    index: int


class GiveBack(NamedTuple):
    """Withdraw a request and call `to` with it, unless the request has already run."""

    live: LiveRequest
    to: Callable[[LiveRequest], None]


class Wake(NamedTuple):
    """Wakes the actor, for example when a late grammar mask arrived for a sequence that is in no step."""


WAKE = Wake()


@dataclass(slots=True, eq=False)
class Pause:
    """A period without steps. The caller of `paused` sets how it ends."""

    reached: asyncio.Future[None]  # its result is set when no step is in flight
    weights_changed: bool = False
    checkpoint: str | None = None  # path of the new weights; None: unknown
    recompute: bool = False  # whether, at the end, the prefix tree is emptied and all sequences are recomputed
    # If set, the replica is unusable and fails with this error at the end of the pause.
    failure: EngineFailure | None = None
