"""A verb (see `runtime.worker.verbs`) that was sent to all ranks of a group, and their answers (`Runner.call`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.distributed.link import Frame, encode
from runtime.errors import CheckpointError, InvalidRequest

# Errors by which a rank refuses a verb before it changes anything. The rank continues, and the caller gets the error.
REFUSALS = (InvalidRequest, CheckpointError)


class VerbCall:
    """Collects the answers of all ranks to one call of a verb."""

    def __init__(self, num_ranks: int, future: asyncio.Future[list[Any]], first_rank: int = 0) -> None:
        self.future = future
        self._first_rank = first_rank
        self._answers: list[Any] = [None] * num_ranks
        self._refusals: dict[int, Exception] = {}
        self._missing = num_ranks

    def answer(self, rank: int, value: Any) -> None:
        """Record the answer of a rank."""
        self._answers[rank - self._first_rank] = value
        self._count()

    def refuse(self, rank: int, error: Exception) -> None:
        """Record that a rank refused. When all ranks have answered, the caller gets the refusal of the lowest rank."""
        self._refusals[rank] = error
        self._count()

    def fail(self, error: Exception) -> None:
        """Fail the call immediately, because a rank has failed and will not answer."""
        if not self.future.done():
            self.future.set_exception(error)

    def _count(self) -> None:
        self._missing -= 1
        if self._missing or self.future.done():
            return
        if self._refusals:
            self.future.set_exception(self._refusals[min(self._refusals)])
        else:
            self.future.set_result(self._answers)


def encode_call(number: int, verb: str, payload: Mapping[str, Any]) -> bytes:
    """Encode the call of a verb. Raises TypeError unless the payload consists of JSON values and int32 arrays."""
    arrays = {name: value for name, value in payload.items() if isinstance(value, np.ndarray)}
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise TypeError(f"{name} must be an array of int32, not of {array.dtype}.")
    values = {name: value for name, value in payload.items() if name not in arrays}
    return encode({"call": number, "verb": verb, "payload": values}, arrays)


def decode_payload(frame: Frame) -> dict[str, Any]:
    """Return the payload of a received verb call."""
    return {**frame.body["payload"], **frame.arrays}


def encode_answer(number: int, value: Any) -> bytes:
    """Encode a rank's answer."""
    return encode({"call": number, "value": value})


def encode_refusal(number: int, error: Exception) -> bytes:
    """Encode the error with which a rank refuses."""
    return encode({"call": number, "refused": type(error).__name__, "message": str(error)})


def take_answer(call: VerbCall, rank: int, frame: Frame) -> None:
    """Record the answer or refusal that a frame contains."""
    body = frame.body
    if "refused" not in body:
        call.answer(rank, body["value"])
        return
    kind = next((each for each in REFUSALS if each.__name__ == body["refused"]), InvalidRequest)
    call.refuse(rank, kind(body["message"]))
