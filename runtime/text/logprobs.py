"""Log-probabilities with the text of their tokens, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.request import Logprobs


class TokenLogprob(NamedTuple):
    """One token. As a JSON array it is the native API's [logprob, id, text]."""

    logprob: float | None  # None where nothing precedes the token
    token_id: int
    text: str | None  # None when texts were not asked for


class TextLogprobs(NamedTuple):
    """`Logprobs` of N consecutive tokens, with texts."""

    chosen: list[TokenLogprob]  # [N]
    top: list[list[TokenLogprob] | None]  # [N], empty when none were asked for
    picked: list[list[TokenLogprob] | None]  # [N], empty when none were asked for


def with_texts(logprobs: Logprobs, text_of: Callable[[int], str] | None) -> TextLogprobs:
    """Give each pair the text of its token. `text_of` is `Tokenizer.token_text`, or None for no texts."""

    def attach(pairs: Sequence[tuple[float | None, int]]) -> list[TokenLogprob]:
        return [
            TokenLogprob(value, token_id, text_of(token_id) if text_of else None) for value, token_id in pairs
        ]

    def attach_each(
        rows: Sequence[Sequence[tuple[float | None, int]] | None],
    ) -> list[list[TokenLogprob] | None]:
        return [None if row is None else attach(row) for row in rows]

    return TextLogprobs(attach(logprobs.chosen), attach_each(logprobs.top), attach_each(logprobs.picked))
