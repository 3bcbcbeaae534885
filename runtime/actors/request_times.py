"""The times at which a request reached each actor."""

from __future__ import annotations

from time import monotonic


class RequestTimes:
    """Times (`time.monotonic`) at which a request reached each phase.

    A field is 0.0 until the request reaches its phase.
    """

    __slots__ = (
        "arrived",
        "ended",
        "first_token",
        "predicted_first_token_s",
        "queued",
        "scheduled",
        "tokenized",
        "tokenizing",
    )

    def __init__(self) -> None:
        self.arrived = monotonic()
        self.tokenizing = 0.0  # written by the tokenizer
        self.tokenized = 0.0
        self.queued = 0.0  # written by the scheduler actor, when the request enters its queue
        # Predicted seconds from `arrived` to `first_token`, or 0.0 if unknown. Written by the scheduler actor.
        self.predicted_first_token_s = 0.0
        self.scheduled = 0.0  # written by the scheduler actor: when its first step was launched
        self.first_token = 0.0  # written by the detokenizer: first token of any choice
        self.ended = 0.0  # written by the table of live requests
