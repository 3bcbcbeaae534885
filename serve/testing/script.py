"""Make the model's output a given text: a hook on the logits allows only the tokens of this text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from runtime.actors.output_stream import OutputStream
from runtime.errors import InvalidRequest
from runtime.request import Request
from serve.python.engine import Engine


def says(running: Engine, text: str) -> Callable[[list[int], Any], None]:
    """Return a hook that makes the output `text`: `engine.generate(prompt, on_logits=says(engine, "Hi"))`.

    Use a new hook for each prompt. Raises `InvalidRequest` if the model has no end-of-text token.
    """
    tokenizer = running.tokenizer
    end = tokenizer.eos_token_id
    if end is None:
        raise InvalidRequest("The model has no token that ends a text.")
    ids_of_text = [*tokenizer.encode(text, add_special_tokens=False), end]
    start: int | None = None

    def allow_next(ids: list[int], logits: Any) -> None:
        nonlocal start
        if start is None or len(ids) < start:
            start = len(ids)
        logits.fill_(float("-inf"))
        logits[ids_of_text[min(len(ids) - start, len(ids_of_text) - 1)]] = 0.0

    return allow_next


class ScriptedCore:
    """An engine core whose outputs are the given texts, one per request. Later requests get the last text."""

    def __init__(self, running: Engine, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not texts:
            raise InvalidRequest("says must be a list of at least one text.", param="says")
        self._running = running
        self._texts = texts
        self._numbers = count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running.core, name)

    def submit(self, request: Request) -> OutputStream:
        """Submit a request whose output is the next text."""
        return self._running.core.submit(self._scripted(request))

    async def submit_all(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Submit requests whose outputs are the next texts."""
        return await self._running.core.submit_all([self._scripted(request) for request in requests])

    def _scripted(self, request: Request) -> Request:
        text = self._texts[min(next(self._numbers), len(self._texts) - 1)]
        return replace(request, on_logits=says(self._running, text))
