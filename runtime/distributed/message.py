"""What travels between processes: frames of JSON and plain arrays. No pickle, nothing executable.

A frame is a fixed head (total length, length of the JSON part), the JSON part, and the arrays' bytes one
after the other. Both ends are the same program on machines of one byte order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from runtime.batch import Batch, PromptLogprobs, Sampling
from runtime.request import LogprobParams

HEAD = struct.Struct("<II")  # bytes after the head, bytes of JSON
MAX_FRAME_BYTES = 1 << 30

_NOTHING = LogprobParams()
_NO_FLOATS = np.zeros(0, np.float32)
_NO_FLAGS = np.zeros(0, np.bool_)


class Frame(NamedTuple):
    """A message: its JSON part, and its int32 arrays by name."""

    body: dict[str, Any]
    arrays: dict[str, NDArray[np.int32]]


def encode(body: Mapping[str, Any], arrays: Mapping[str, NDArray[np.int32]] | None = None) -> bytes:
    """The frame as bytes. `body` may hold dataclasses and sets; arrays become int32."""
    parts: list[Any] = []
    if arrays:
        flat = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
        body = {**body, "": [[name, array.shape] for name, array in flat.items()]}
        parts = [array.data.cast("B") if array.size else b"" for array in flat.values()]
    text = orjson.dumps(body, default=_plain)
    length = len(text) + sum(len(part) for part in parts)
    return b"".join([HEAD.pack(length, len(text)), text, *parts])


def decode(content: bytearray | bytes, text_length: int) -> Frame:
    """The frame of these bytes, the head taken off; its arrays share their memory."""
    body = orjson.loads(memoryview(content)[:text_length])
    arrays: dict[str, NDArray[np.int32]] = {}
    offset = text_length
    for name, shape in body.pop("", ()):
        size = math.prod(shape)
        flat = np.frombuffer(content, np.uint8, size * 4, offset)  # bytes first: they need no alignment
        arrays[name] = flat.view(np.int32).reshape(shape)
        offset += size * 4
    return Frame(body, arrays)


def encode_batch(batch: Batch) -> bytes:
    """What the other ranks need of a batch: everything but how tokens are chosen, and by whom."""
    wanted = batch.prompt_logprobs
    arrays = {
        "starts": batch.starts,
        "counts": batch.counts,
        "slots": batch.slots,
        "token_ids": batch.token_ids,
        "page_table": batch.page_table,
    }
    if batch.sampling is not None:
        arrays["rows"] = batch.sampling.rows
    if wanted:
        arrays["wanted"] = np.array([(w.row, w.offset, len(w.targets)) for w in wanted], np.int32)
    return encode({"batch": batch.number}, arrays)


def decode_batch(frame: Frame) -> Batch:
    """The batch as a worker needs it: no sequences, of `sampling` the rows alone, targets that are zeros."""
    arrays = frame.arrays
    rows = arrays.get("rows")
    return Batch(
        number=frame.body["batch"],
        sequences=(),
        starts=arrays["starts"],
        counts=arrays["counts"],
        slots=arrays["slots"],
        token_ids=arrays["token_ids"],
        page_table=arrays["page_table"],
        sampling=None if rows is None else Sampling(rows, greedy=_NO_FLAGS, uniform=_NO_FLOATS),
        prompt_logprobs=tuple(
            PromptLogprobs(row, offset, np.zeros(count, np.int32), _NOTHING)
            for row, offset, count in arrays["wanted"].tolist()
        )
        if "wanted" in arrays
        else (),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot travel between processes.")
