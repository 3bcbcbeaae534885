"""A sentencepiece model beside tokenizer code of its own (Baichuan's), read by sentencepiece: that code is not run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import ConfigurationError
from runtime.tokenizer.backend import EncodedPair, refuse_half_pairs, require_no_more

SPACE = "\u2581"  # which pieces have in the place of a space


class PiecesBackend:
    """See `runtime.tokenizer.backend.Backend`."""

    def __init__(
        self, file: Path, special: Mapping[str, str], turns: Sequence[int], *, begin: bool, end: bool
    ) -> None:
        """`special` are tokens by their names, `turns` the ids of others that are found in texts.

        Texts get a first token if they are to `begin` with it, a last one to `end` with. Raises ConfigurationError for
        a file that cannot be read, and for tokens that it does not have.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigurationError(
                f"{file} needs a library: pip install 'penstock[sentencepiece]'."
            ) from error
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"{file} is no sentencepiece model: {error}") from error
        self.base_size = self.vocab_size = int(self._model.vocab_size())
        named = [*special.values(), *(self.token(token_id) or str(token_id) for token_id in turns)]
        found = {text: self.token_id(text) for text in named}
        self.added = {text: token_id for text, token_id in found.items() if token_id is not None}
        if len(self.added) < len(found):
            raise ConfigurationError(f"{file} has no {' '.join(found.keys() - self.added.keys())}.")
        self.special_ids = frozenset(self.added[text] for text in special.values())
        self._apart = re.compile("|".join(re.escape(text) for text in self.added) or "(?!)")
        self._before = [self.added[special["bos_token"]]] if begin and "bos_token" in special else []
        self._behind = [self.added[special["eos_token"]]] if end and "eos_token" in special else []
        self._adds_space = self._model.encode("a") != self._model.encode(" a") and self._strips()

    def _strips(self) -> bool:
        """Whether a text loses the space that it begins with when it is decoded."""
        for token_id in range(self.vocab_size):
            piece = self.token(token_id) or ""
            if piece.startswith(SPACE) and len(piece) > 1:
                return not self._model.decode([token_id]).startswith(" ")
        return False

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        found = [self._ids(text) for text in texts]
        if add_special_tokens:
            found = [[*self._before, *ids, *self._behind] for ids in found]
        require_no_more(found, max_tokens)
        return found

    def _ids(self, text: str) -> list[int]:
        refuse_half_pairs(text)
        ids, begin = [], 0
        for found in self._apart.finditer(text):
            ids += [*self._model.encode(text[begin : found.start()]), self.added[found[0]]]
            begin = found.end()
        return ids + self._model.encode(text[begin:])

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        ids, more = self._ids(first), [*self._ids(second), *self._behind]
        begin = len(self._before) + len(ids)
        return EncodedPair([*self._before, *ids, *more], [0] * begin + [1] * len(more), begin)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        silent = self.special_ids if skip_special_tokens else ()
        shown = [token_id for token_id in ids if token_id not in silent]
        text = b"".join(map(self.bytes_behind, shown)).decode(errors="replace")
        return text[1:] if shown and self.bytes_of(shown[0]) != self.bytes_behind(shown[0]) else text

    def token(self, token_id: int) -> str | None:
        return self._model.id_to_piece(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        found = int(self._model.piece_to_id(token))  # that of the unknown token for what there is not
        return found if self.token(found) == token else None

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for at the beginning of a text."""
        found = self.bytes_behind(token_id)
        return found.removeprefix(b" ") if self._adds_space and not self._model.is_byte(token_id) else found

    def bytes_behind(self, token_id: int) -> bytes:
        """What a token stands for behind another one."""
        piece = self.token(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        if self._model.is_byte(token_id):
            return bytes.fromhex(piece[3:-1])
        return b"" if self._model.is_control(token_id) else piece.replace(SPACE, " ").encode()
