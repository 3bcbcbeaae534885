"""Parts common to chat and completion answers: leading fields, start and end of events, and token counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from runtime.request import Usage

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """Fields that have the same value in every event of one answer."""

    id: str
    created_s: int
    model: str
    weight_version: str
    cache_report: bool

    @classmethod
    def of(cls, core: EngineCore, label: str, model: str) -> AnswerHeader:
        serve = core.plan.serve
        return cls(label, int(time.time()), model, serve.weight_version, serve.cache_report)

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a complete answer, for calls that are not streamed."""
        metadata = {"weight_version": self.weight_version}
        return {**self.fields(kind), "choices": choices, "usage": usage, "metadata": metadata}

    def event_start(self, kind: str) -> bytes:
        """Return the bytes of an event up to the first item of its choices."""
        return b"data: " + orjson.dumps(self.fields(kind))[:-1] + b',"choices":['


def event_end(usage: dict[str, Any] | None = None) -> bytes:
    """Return the bytes of an event after the last item of its choices."""
    return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class UsageCount:
    """Adds up the token counts of all choices. A prompt counts once, even if it has several choices."""

    def __init__(self, *, cache_report: bool) -> None:
        self._cache_report = cache_report
        self._latest: dict[tuple[int, int], Usage] = {}
        self._reasoning: dict[tuple[int, int], int] = {}

    def note(self, request_index: int, index: int, usage: Usage) -> None:
        """Record the usage so far of one choice of the prompt at `request_index`."""
        self._latest[request_index, index] = usage

    def note_reasoning(self, request_index: int, index: int, num_tokens: int) -> None:
        """Record the number of reasoning tokens so far in a choice's output."""
        if num_tokens:
            self._reasoning[request_index, index] = num_tokens

    def total(self) -> dict[str, Any]:
        """Return the `usage` object of the whole answer."""
        first = {request_index: usage for (request_index, _), usage in sorted(self._latest.items(), reverse=True)}
        prompt = sum(usage.prompt for usage in first.values())
        cached = sum(usage.cached for usage in first.values())
        output = sum(usage.output for usage in self._latest.values())
        return self._usage(prompt, output, cached, sum(self._reasoning.values()))

    def so_far(self, request_index: int, index: int, usage: Usage) -> dict[str, Any]:
        """Return the `usage` object for one choice of a stream, with the token counts so far."""
        return self._usage(*usage[:3], self._reasoning.get((request_index, index), 0))

    def _usage(self, prompt: int, output: int, cached: int, reasoning: int) -> dict[str, Any]:
        details = {"cached_tokens": cached} if self._cache_report and cached > 0 else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
            "reasoning_tokens": reasoning,
        }
