"""What every OpenAI answer begins with, and how its events are put together from ready bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from serve.core import EngineCore


@dataclass(frozen=True, slots=True)
class Head:
    """The same in every event of one answer."""

    id: str
    created_s: int
    model: str
    weight_version: str
    cache_report: bool

    @classmethod
    def of(cls, core: EngineCore, label: str, model: str) -> Head:
        serve = core.plan.serve
        return cls(label, int(time.time()), model, serve.weight_version, serve.cache_report)

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """An answer that is not streamed."""
        metadata = {"weight_version": self.weight_version}
        return {**self.fields(kind), "choices": choices, "usage": usage, "metadata": metadata}

    def event_start(self, kind: str) -> bytes:
        """An event up to the first item of its choices."""
        return b"data: " + orjson.dumps(self.fields(kind))[:-1] + b',"choices":['


def event_end(usage: dict[str, Any] | None = None) -> bytes:
    """An event from the end of its choices."""
    return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
