"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from runtime.request import Usage


class UsageCount:
    """Adds up the usage of all choices. A prompt counts once however many choices it has."""

    def __init__(self, *, cache_report: bool) -> None:
        self._cache_report = cache_report
        self._latest: dict[tuple[int, int], Usage] = {}

    def note(self, place: int, index: int, usage: Usage) -> None:
        """The usage so far of one choice of the prompt at `place`."""
        self._latest[place, index] = usage

    def total(self) -> dict[str, Any]:
        """The `usage` object."""
        first = {place: usage for (place, _), usage in sorted(self._latest.items(), reverse=True)}
        prompt = sum(usage.prompt for usage in first.values())
        cached = sum(usage.cached for usage in first.values())
        return self._usage(prompt, sum(usage.output for usage in self._latest.values()), cached)

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """The `usage` object of one choice."""
        return self._usage(*usage)

    def _usage(self, prompt: int, output: int, cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached} if self._cache_report and cached > 0 else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": details,
            "reasoning_tokens": 0,
        }
