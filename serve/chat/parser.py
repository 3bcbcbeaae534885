"""The text of one choice as chat events, wherever it was cut."""

from __future__ import annotations

from runtime.request import Chunk
from serve.chat.events import ChatEvent, Content


class OutputParser:
    """Reads the output of one choice, in pieces or whole. This one takes all of it as the answer's text.

    However the text is cut, the pieces of each content, reasoning and call put together are the same.
    """

    num_calls: int = 0  # that have begun
    num_reasoning_tokens: int = 0

    def feed(self, text: str, *, final: bool = False) -> list[ChatEvent]:
        """What is certain now. With `final` nothing is held back any more."""
        return [Content(text)] if text else []

    def feed_chunk(self, chunk: Chunk) -> list[ChatEvent]:
        """`feed` for a chunk of an output stream; it also counts the tokens."""
        return self.feed(chunk.text, final=chunk.finish is not None)
