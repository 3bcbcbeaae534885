"""Ids of words that were encoded before, for tokenizers that cut texts at spaces before anything else (BERT's)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

# Of texts put together here, for which Python's lock is kept some 100 us; some milliseconds where all words are new.
MAX_CHARS = 8192
MAX_WORDS = 32_768  # kept: 5 MB of letters, 35 of Chinese characters
MAX_WORD_CHARS = 32  # of a word that is kept


class Words:
    """Puts the ids of a text together from those of its words: a tenth of the time of encoding it.

    May be called from any thread.
    """

    def __init__(self, library: tokenizers.Tokenizer, before: Sequence[int], after: Sequence[int]) -> None:
        self._library = library
        self._before, self._after = [*before], [*after]  # special tokens around a text
        self._ids: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises TypeError when the text holds half a surrogate pair."""
        words, known = text.split(" "), self._ids
        found = [*map(known.get, words)]
        if None in found:
            learned = self._encode({word for word, ids in zip(words, found, strict=True) if ids is None})
            found = [learned[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
        ids = [token_id for of_word in found if of_word for token_id in of_word]
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _encode(self, unknown: set[str]) -> dict[str, tuple[int, ...]]:
        words = [*unknown]  # the library's fast calls do not say which ids are whose
        [encoding] = self._library.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        ids: list[list[int]] = [[] for _ in words]
        for index, token_id in zip(encoding.word_ids, encoding.ids, strict=True):
            if index is not None:
                ids[index].append(token_id)
        learned = {word: tuple(of_word) for word, of_word in zip(words, ids, strict=True)}
        if len(self._ids) + len(learned) > MAX_WORDS:
            self._ids = {}  # others come back soon
        self._ids.update((word, of_word) for word, of_word in learned.items() if len(word) <= MAX_WORD_CHARS)
        return learned


def words_of(library: tokenizers.Tokenizer) -> Words | None:
    """None where a word's ids depend on what stands around it, or that is not known."""
    steps = (
        (library.normalizer, BertNormalizer),
        (library.pre_tokenizer, BertPreTokenizer),
        (library.model, WordPiece),
    )
    if not all(isinstance(step, kind) for step, kind in steps):
        return None
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    if not all(content.isascii() and content.isprintable() and " " not in content for content in added):
        return None
    encoding = library.encode("a")
    around = [*zip(encoding.ids, encoding.special_tokens_mask, strict=True)]
    before = [token_id for token_id, _ in takewhile(lambda each: each[1], around)]
    after = [token_id for token_id, _ in takewhile(lambda each: each[1], reversed(around))][::-1]
    if len(before) + 1 + len(after) != len(around):
        return None
    return Words(library, before, after)
