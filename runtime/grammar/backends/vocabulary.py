"""Convert a tokenizer's vocabulary to the forms that the grammar libraries read."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from runtime.grammar_spec import InvalidGrammar
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.token_bytes import TokenBytes
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Number of random tokens whose bytes in llguidance are compared with Penstock's. A sample is enough, because
# differences affect whole classes of tokens.
NUM_COMPARED = 512
# Regular expressions for classes of tokens. If a string may continue with every text of a class, llguidance allows the
# tokens of the class at once; it tests all other tokens one by one. llguidance's default classes (up to 10, up to 30
# and any number of JSON string characters) are too coarse near a string's maxLength, and for patterns that allow only
# letters.
_CHARACTER = r'[^"\\\x00-\x1F\x7F\x{2028}\x{2029}]'
SLICES = [
    *(f"{_CHARACTER}{{1,{length}}}" for length in (1, 3, 5, 8, 12, 18, 30)),
    f"{_CHARACTER}+",
    *(f"[{characters}]{{1,12}}" for characters in ("a-z", "a-zA-Z", "a-zA-Z0-9", "a-zA-Z ", "a-zA-Z0-9 ")),
]


def load_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> tuple[LLTokenizer, TokenBytes]:
    """Return llguidance's vocabulary for a model with `vocab_size` tokens, and the bytes of the tokens.

    Holds the GIL for up to a second with 150,000 tokens. Raises `InvalidGrammar` if outputs of this tokenizer cannot be
    constrained.
    """
    from llguidance import LLTokenizer

    table, ends = _checked(tokenizer, vocab_size, eos_ids)
    size = max(tokenizer.vocab_size, vocab_size)
    if isinstance(tokenizer.backend, FastBackend):
        try:
            found = LLTokenizer(tokenizer.backend.library.to_str(), n_vocab=size, eos_token=ends, slices=SLICES)
        except ValueError:  # llguidance cannot read this kind of tokenizer
            found = None
        if found is not None and _agrees(found, tokenizer, table):
            return found, table
    tokens: Any = _Tokens(tokenizer, table, size, ends)
    return LLTokenizer(tokens, n_vocab=size, eos_token=ends, slices=SLICES), table


def text_tokens(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each token, and the ids that end an output. Special and unused tokens have no bytes.

    Raises `InvalidGrammar` if outputs of this tokenizer cannot be constrained.
    """
    table, ends = _checked(tokenizer, vocab_size, eos_ids)
    special = tokenizer.special_ids | {*ends}
    size = max(tokenizer.vocab_size, vocab_size)
    tokens = [b"" if token_id in special else table.rest[token_id] for token_id in range(size)]
    return [b"" if token == b"\xff" else token for token in tokens], ends


def _checked(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> tuple[TokenBytes, list[int]]:
    table = tokenizer.bytes_of
    if table is None:
        raise InvalidGrammar("this model's tokenizer has no bytes for its tokens")
    ends = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
    if not ends:
        raise InvalidGrammar("this model has no token that ends its output")
    return table, ends


def _agrees(found: LLTokenizer, tokenizer: Tokenizer, table: TokenBytes) -> bool:
    """Whether llguidance has the same bytes as `table` for a sample of tokens, and knows all special tokens."""
    ids = range(tokenizer.vocab_size)
    special = tokenizer.special_ids
    for token_id in random.Random(0).sample(ids, min(NUM_COMPARED, len(ids))):
        ours = table.rest[token_id]
        if token_id not in special and ours != b"\xff" and found.decode_bytes([token_id]) != ours:
            return False
    return all(found.is_special_token(token_id) for token_id in special if token_id in ids)


class _Tokens:
    """A vocabulary in the form that llguidance accepts, for tokenizers that it cannot read itself."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, table: TokenBytes, size: int, eos_ids: list[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [table.rest[token_id] for token_id in range(size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text. llguidance calls it."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        [ids] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return ids
