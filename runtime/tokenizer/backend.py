"""The two kinds of library object that turn text into ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers


class Backend(Protocol):
    """What a tokenizer needs of the library below it. Methods are safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def base_size(self) -> int:
        """The same without the added tokens."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the added tokens."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are left out of a text on request."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Raises TypeError when a text holds half a surrogate pair."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Ids beyond the vocabulary count as nothing."""
        ...

    def token(self, token_id: int) -> str | None: ...

    def token_id(self, token: str) -> int | None: ...


class FastBackend:
    """A `tokenizers.Tokenizer`. Encoding releases the GIL."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        tokens = library.get_added_tokens_decoder()
        self.library = library
        self.base_size: int = library.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(self.base_size, 1 + max(tokens, default=-1))
        self.added = {token.content: token_id for token_id, token in tokens.items()}
        self.special_ids = frozenset(token_id for token_id, token in tokens.items() if token.special)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The single-text calls of the library keep the GIL; the batch calls release it.
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)


class SlowBackend:
    """A tokenizer of transformers that has no `tokenizers.Tokenizer` inside. Encoding keeps the GIL."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.added = dict(library.get_added_vocab())
        self.base_size = int(library.vocab_size)
        self.vocab_size = max(self.base_size, len(library), 1 + max(self.added.values(), default=-1))
        self.special_ids = frozenset(library.all_special_ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            if not text.isascii():
                _refuse_half_pairs(text)
        return [list(self.library.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self.library.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str | None:
        return self.library.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        token_id = self.library.convert_tokens_to_ids(token)
        return token_id if self.token(token_id) == token else None


def _refuse_half_pairs(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError("half a surrogate pair") from error
