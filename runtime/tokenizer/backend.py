"""Adapters for the libraries that encode text to token ids and decode token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import tokenizers

from runtime.errors import ContextOverflow
from runtime.tokenizer.words import MAX_CHARS, words_of


class EncodedPair(NamedTuple):
    """The token ids of two texts, with the special tokens around and between the texts."""

    ids: list[int]
    types: list[int]  # token type of each id: 1 in the second text if the tokenizer distinguishes the texts, else 0
    second: int  # index in `ids` of the second text's first token


class Backend(Protocol):
    """Interface to the library that a `Tokenizer` calls. Several threads may call its methods."""

    @property
    def vocab_size(self) -> int:
        """The highest token id + 1."""
        ...

    @property
    def base_size(self) -> int:
        """The vocabulary size without the added tokens."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """The added tokens: text -> id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `decode` omits with `skip_special_tokens`."""
        ...

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the ids of each text.

        Raises TypeError if a text has a lone surrogate, and ContextOverflow if it has more than `max_tokens` tokens.
        """
        ...

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the ids of both texts together. Raises TypeError if a text has a lone surrogate."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of the ids. Ids beyond the vocabulary are ignored."""
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
            ids = [self._words.encode(text, add_special_tokens) for text in texts]
            check_num_tokens(ids, max_tokens)
            return ids
        # The calls of `tokenizers` for a single text keep the GIL; its batch calls release the GIL.
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        # Check before creating the lists: creating lists of millions of ids holds the GIL for a long time.
        check_num_tokens(encodings, max_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        [encoding] = self.library.encode_batch_fast([(first, second)])
        return EncodedPair(encoding.ids, encoding.type_ids, _start_of_second(encoding.sequence_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)


class SlowBackend:
    """A transformers tokenizer that does not use the library `tokenizers`. Encoding holds the GIL."""

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
                check_surrogates(text)
        ids = [list(self.library.encode(text, add_special_tokens=add_special_tokens)) for text in texts]
        check_num_tokens(ids, max_tokens)
        return ids

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        check_surrogates(first + second)
        encoding = self.library(first, second, return_token_type_ids=True)
        second_ids = self.library.encode(second, add_special_tokens=False)
        ids, types = list(encoding["input_ids"]), list(encoding["token_type_ids"])
        start = types.index(1) if 1 in types else max(len(ids) - len(second_ids) - 1, 0)
        return EncodedPair(ids, types, start)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self.library.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        return self.library.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        token_id = self.library.convert_tokens_to_ids(token)
        return token_id if self.token(token_id) == token else None


def _start_of_second(sequence_ids: Sequence[int | None]) -> int:
    return sequence_ids.index(1) if 1 in sequence_ids else len(sequence_ids)


def check_num_tokens(encodings: Sequence[Sized], max_tokens: int | None) -> None:
    """Raise ContextOverflow if a text has more than `max_tokens` tokens."""
    longest = max(map(len, encodings), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise ContextOverflow.of_input(longest, max_tokens, "text")


def check_surrogates(text: str) -> None:
    """Raise TypeError if the text has a lone surrogate, as the library `tokenizers` does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError("The text has a lone surrogate.") from error
