"""Decode token ids to text while a sequence grows."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

from runtime.tokenizer.backend import Backend
from runtime.tokenizer.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
CONTEXT = 8  # number of earlier tokens that `_Window` decodes again with each new token
MAX_HELD = 8  # maximum number of tokens that `_Window` holds back; a character has at most four bytes


class IncrementalDecoder:
    """Decodes the output tokens of one choice as they arrive.

    The joined texts of all calls of `push` and `flush` equal the text of prompt and output without the text of the
    prompt. It does not matter how the ids are divided among the calls. If the output completes a character that began
    in the prompt, the whole character is returned.

    `token_bytes` is None for tokenizers whose decoder looks at neighbouring tokens. With `skip_special_tokens`, the
    special tokens in `shown_special_ids` are still shown. `spaces_between_special_tokens` is a sampling parameter that
    has no effect, because no tokenizer of transformers 5 inserts such spaces.
    """

    __slots__ = ("_begun", "_first", "_held", "_rest", "_shared", "_skip", "_token_bytes", "_window")

    def __init__(
        self,
        backend: Backend,
        token_bytes: TokenBytes | None,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._skip = skip_special_tokens
        self._token_bytes = token_bytes
        self._window: _Window | None = None
        self._held = b""  # bytes of an incomplete character
        self._shared = False  # whether the incomplete character began in the prompt
        if token_bytes is None:
            silent = backend.special_ids - shown_special_ids if shown_special_ids else frozenset()
            self._window = _Window(backend, prompt_ids, skip_special_tokens, silent)
            return
        self._first, self._rest = token_bytes.tables(
            skip_special_tokens=skip_special_tokens, shown_ids=shown_special_ids
        )
        self._begun = any(token_bytes.counts(token_id, skip_special_tokens) for token_id in reversed(prompt_ids))
        self._held = _incomplete_end(self._rest, prompt_ids)
        self._shared = bool(self._held)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text of the new tokens. The bytes of an incomplete last character wait for the next call."""
        if self._window is not None:
            return "".join([self._window.step(token_id) for token_id in ids])
        rest = self._rest
        if self._begun:
            data = b"".join([rest[token_id] for token_id in ids])
        else:
            data = self._begin(ids)
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._without_shared(text) if self._shared else text

    def flush(self) -> str:
        """Return the text that is still held back: a replacement character for an incomplete last character, or ''."""
        if self._window is not None:
            return self._window.flush()
        text = self._held.decode(errors="replace")
        self._held = b""
        return self._without_shared(text) if self._shared else text

    def _begin(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the first ids of a text. The first token with text may lose its leading space."""
        if self._token_bytes is None:
            return b""
        for index, token_id in enumerate(ids):
            if self._token_bytes.counts(token_id, self._skip):
                self._begun = True
                return self._first[token_id] + b"".join([self._rest[later] for later in ids[index + 1 :]])
        return b""

    def _without_shared(self, text: str) -> str:
        """Drop a leading replacement character, which stands for the incomplete character at the prompt's end."""
        if not text:
            return text
        self._shared = False
        return text[1:] if text[0] == REPLACEMENT else text


def _incomplete_end(rest: Mapping[int, bytes], prompt_ids: Sequence[int]) -> bytes:
    """Return the bytes of an incomplete character at the prompt's end. Only the last four bytes are read."""
    tail = b""
    for token_id in reversed(prompt_ids):
        tail = rest[token_id] + tail
        if len(tail) >= 4:
            break
    return tail[utf_8_decode(tail, "replace", False)[1] :]


class _Window:
    """Decodes the last tokens again with each new token, for decoders that look at neighbouring tokens.

    Text that ends in an incomplete character is held back until the character is complete, or `MAX_HELD` tokens wait.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        # The special tokens that `step` skips. Empty if the backend skips all special tokens, or if none are skipped.
        self._silent = silent_ids if skip_special_tokens else frozenset()
        self._skip = skip_special_tokens and not silent_ids
        self._ids = [token_id for token_id in prompt_ids[-CONTEXT:] if token_id not in self._silent]
        self._num_held = 0  # number of tokens at the end of _ids whose text has not been returned
        self._before = backend.decode(self._ids, skip_special_tokens)

    def step(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        self._ids.append(token_id)
        self._num_held += 1
        text = self._backend.decode(self._ids, self._skip)
        if text.endswith(REPLACEMENT) and self._num_held < MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._backend.decode(self._ids, self._skip)) if self._num_held else ""

    def _emit(self, text: str) -> str:
        before = self._before
        if not text.startswith(before):  # an incomplete character at the end of `before` is complete now
            before = before.rstrip(REPLACEMENT)
        new = text[len(before) :]
        self._ids = self._ids[-CONTEXT:]
        self._num_held = 0
        self._before = self._backend.decode(self._ids, self._skip)
        return new
