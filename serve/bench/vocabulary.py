"""The token ids that prompts are made of, and how long a text is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_FITS = 12  # rounds of decoding and encoding before a text is taken as it is


class Vocabulary:
    """Ordinary token ids (no special ones) and, when a tokenizer is at hand, their texts."""

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> None:
        if not len(ids):
            raise ConfigurationError("The vocabulary holds no ordinary token.")
        self.ids = np.asarray(ids, dtype=np.int64)
        self._tokenizer = tokenizer

    @classmethod
    def of_size(cls, size: int) -> Vocabulary:
        """Ids 0 to `size` - 1 without texts: enough for a server that takes token ids."""
        return cls(range(size))

    @classmethod
    def of_tokenizer(cls, path: str) -> Vocabulary:
        """Read `tokenizer.json`, given itself or the directory that holds it."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigurationError(f"There is no tokenizer at {file}.")
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        return cls(sorted(set(tokenizer.get_vocab().values()) - special), tokenizer)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def run(self, start: int, length: int) -> list[int]:
        """`length` consecutive ordinary ids from the `start`-th on, round the vocabulary."""
        return self.ids[(start + np.arange(length)) % len(self.ids)].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._need_tokenizer().decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self._need_tokenizer().encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def text_of(self, ids: Sequence[int]) -> str:
        """A text that starts like `ids` and encodes to as many tokens, or as near as can be had.

        Decoding and encoding again rarely gives back the same ids, so the text is cut or lengthened (with the
        ids from the front) until the number is right.
        """
        wanted = len(ids)
        if not wanted:
            return ""
        text, best = self.decode(ids), ""
        for _ in range(MAX_FITS):
            found = self.encode(text)
            if not best or abs(len(found) - wanted) < abs(self.count(best) - wanted):
                best = text
            if len(found) == wanted:
                break
            missing = wanted - len(found)
            text = self.decode(found[:wanted]) if missing < 0 else text + self.decode(ids[:missing])
        return best

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigurationError("Prompts as text need --tokenizer; or send token ids with --send ids.")
        return self._tokenizer
