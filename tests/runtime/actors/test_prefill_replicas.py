"""When a request ends, its prompt on a prefill replica is aborted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_runner import make_sequence
from runtime.actors.live_requests import LiveRequest
from runtime.actors.output_stream import OutputStream
from runtime.actors.prefill_replicas import PrefillReplicas


class Actor:
    """A replica that notes which prompts it gets and which ones are aborted."""

    def __init__(self) -> None:
        self.storage = SimpleNamespace(attachment=object())
        self.scheduler = SimpleNamespace(num_cached=lambda sequence: 0)
        self.admitted: list[Any] = []
        self.aborted: list[Any] = []
        self.abort = self.aborted.append

    def admit(self, live: Any) -> None:
        live.scheduler = self
        self.admitted.append(live)


def test_a_request_that_moves_has_one_prompt() -> None:
    sequence = make_sequence(tuple(range(64)), max_new_tokens=4)
    live = LiveRequest(sequence.request, OutputStream(sequence.request.id, 1, lambda _: None))
    live.sequences = [sequence]
    prompts, prefill, first, second = PrefillReplicas(16), *(Actor() for _ in range(3))
    prompts.start(live, [prefill], first)  # type: ignore[list-item, arg-type]
    prompts.start(live, [prefill], second)  # type: ignore[list-item, arg-type]
    before, after = prefill.admitted
    assert prefill.aborted == [before]
    prompts.ended(live, None)
    assert prefill.aborted == [before, after]
