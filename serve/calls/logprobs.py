"""Log-probabilities in OpenAI's two formats: the format of chat, and the older format of completions."""

from __future__ import annotations

import codecs
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.request import Logprobs
from serve.calls.json_pieces import PAUSE_S

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

PAUSED_TOKENS = 64  # a thread that builds a long list sleeps after this many tokens (about 0.2 ms), so that others run
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot express


def chat_logprobs(logprobs: Logprobs, tokenizer: Tokenizer, *, as_ids: bool = False) -> dict[str, Any]:
    """Return `{"content": [{token, bytes, logprob, top_logprobs}]}`.

    With `as_ids`, tokens are written as `token_id:5`.
    """
    content = []
    for index, (logprob, token_id) in enumerate(logprobs.chosen):
        alternatives = logprobs.top[index] if logprobs.top else None
        top = [_chat_token(tokenizer, token, value, as_ids) for value, token in alternatives or ()]
        content.append({**_chat_token(tokenizer, token_id, logprob, as_ids), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _name(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float | None, as_ids: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": _name(tokenizer, token_id, as_ids),
        "bytes": None if raw is None else list(raw),
        "logprob": _finite(logprob),
    }


def _finite(logprob: float | None) -> float:
    return LOWEST if logprob is None else max(logprob, LOWEST)


def with_top(logprobs: Logprobs, num_top: int) -> Logprobs:
    """Return the log-probabilities with at most `num_top` alternatives per token: the others are removed."""
    return logprobs._replace(top=[None if pairs is None else pairs[:num_top] for pairs in logprobs.top])


def prompt_logprobs(logprobs: Logprobs, tokenizer: Tokenizer, num_top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: one entry per token, None for the first token.

    An entry maps token ids, as text, to `{logprob, rank, decoded_token}`. The prompt's own token comes first. If
    this token is not among the n best tokens, its rank is n + 1, which is a lower bound.
    """
    found: list[dict[str, Any] | None] = []
    for index, (value, token_id) in enumerate(logprobs.chosen):
        if value is None:
            found.append(None)
            continue
        best = (logprobs.top[index] if logprobs.top else None) or ()
        ranks = {other: rank for rank, (_, other) in enumerate(best, start=1)}
        pairs = {token_id: value} | {other: logprob for logprob, other in best[:num_top] if other != token_id}
        if index % PAUSED_TOKENS == 0:
            time.sleep(PAUSE_S)
        found.append(
            {
                str(each): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(each, len(best) + 1),
                    "decoded_token": tokenizer.token_text(each),
                }
                for each, logprob in pairs.items()
            }
        )
    return found


class CompletionLogprobs:
    """Builds the log-probabilities of one choice in pieces: `{tokens, token_logprobs, top_logprobs, text_offset}`.

    `text_offset` counts characters from the start of the choice's text. A token that has only some bytes of a character
    gets the offset of that character. A special token, which the text does not show, gets the offset of the text after
    it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._left_out = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._at_start = True
        self._names: dict[int, str] = {}  # names of the tokens so far; most of them recur

    def piece(self, logprobs: Logprobs, text: str) -> dict[str, Any]:
        """Return the object for the tokens since the last piece.

        `text` is the text since the last piece. If the choice's text does not begin with the leading space of its first
        token, that space does not count in the offsets.
        """
        ids = [token_id for _, token_id in logprobs.chosen]
        return {
            "text_offset": [self._text_offset(token_id, text) for token_id in ids],
            "token_logprobs": [None if value is None else _finite(value) for value, _ in logprobs.chosen],
            "tokens": [_name(self._tokenizer, token_id, self._as_ids) for token_id in ids],
            "top_logprobs": self._alternatives(logprobs),
        }

    def _text_offset(self, token_id: int, text: str) -> int:
        offset = self._offset
        if token_id not in self._left_out:
            shown = self._decoder.decode(self._tokenizer.token_bytes(token_id) or b"")
            if self._at_start and shown.startswith(" ") and not text.startswith(" "):
                shown = shown[1:]
            self._at_start = False
            self._offset += len(shown)
        return offset

    def _alternatives(self, logprobs: Logprobs) -> Sequence[Mapping[str, float] | None]:
        """Return one entry per token: a mapping from the top tokens and the token itself to log-probabilities.

        The entry is None for the first token of a prompt, which has no log-probability. This function sleeps regularly
        to let the event loop run, because callers build long lists in a thread.
        """
        names = self._names
        alternatives: list[Mapping[str, float] | None] = []
        for index, (value, token_id) in enumerate(logprobs.chosen):
            pairs = logprobs.top[index] if logprobs.top else ()
            if value is None or pairs is None:
                alternatives.append(None)
                continue
            named: dict[str, float] = {}
            for logprob, token in [*pairs, (value, token_id)]:
                name = names.get(token)
                if name is None:
                    name = names[token] = _name(self._tokenizer, token, self._as_ids)
                if name not in named:
                    named[name] = logprob if logprob is not None and logprob > LOWEST else LOWEST
            alternatives.append(named)
            if index % PAUSED_TOKENS == PAUSED_TOKENS - 1:
                time.sleep(PAUSE_S)
        return alternatives
