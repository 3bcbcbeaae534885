"""The library objects that turn text into ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import tokenizers

from runtime.errors import ContextOverflow
from runtime.tokenizer.words import MAX_CHARS, words_of


class EncodedPair(NamedTuple):
    """Two texts with the special tokens between and around them."""

    ids: list[int]
    types: list[int]  # 1 where a token is marked as one of the second text; not all tokenizers do that
    second: int  # where the second text begins, marked or not


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

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Raises TypeError when a text holds half a surrogate pair, ContextOverflow when one has more tokens."""
        ...

    def encode_pair(self, first: str, second: str) -> EncodedPair:
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
        self._words = words_of(library)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        if self._words is not None and sum(map(len, texts)) <= MAX_CHARS:
            found = [self._words.encode(text, add_special_tokens) for text in texts]
            require_no_more(found, max_tokens)
            return found
        # The single-text calls of the library keep the GIL; the batch calls release it.
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        require_no_more(encodings, max_tokens)  # first: making lists of millions of ids keeps the GIL
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        [encoding] = self.library.encode_batch_fast([(first, second)])
        return EncodedPair(encoding.ids, encoding.type_ids, _begin_of_second(encoding.sequence_ids))

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

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        for text in texts:
            if not text.isascii():
                refuse_half_pairs(text)
        found = [list(self.library.encode(text, add_special_tokens=add_special_tokens)) for text in texts]
        require_no_more(found, max_tokens)
        return found

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        refuse_half_pairs(first + second)
        found = self.library(first, second, return_token_type_ids=True)
        alone = self.library.encode(second, add_special_tokens=False)
        ids, types = list(found["input_ids"]), list(found["token_type_ids"])
        return EncodedPair(ids, types, types.index(1) if 1 in types else max(len(ids) - len(alone) - 1, 0))

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


def _begin_of_second(sequence_ids: Sequence[int | None]) -> int:
    return sequence_ids.index(1) if 1 in sequence_ids else len(sequence_ids)


def require_no_more(encodings: Sequence[Sized], max_tokens: int | None) -> None:
    """Raise ContextOverflow for more than `max_tokens` of any text."""
    longest = max(map(len, encodings), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise ContextOverflow.of_input(longest, max_tokens, "text")


def refuse_half_pairs(text: str) -> None:
    """Raise TypeError, as the library of fast tokenizers does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError("half a surrogate pair") from error
