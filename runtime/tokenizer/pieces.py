"""Tokenizers that consist of a sentencepiece model and custom Python code (Baichuan). The code is not run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import ConfigurationError
from runtime.tokenizer.backend import EncodedPair, check_num_tokens, check_surrogates

SPACE = "\u2581"  # the character that pieces use for a space


class PiecesBackend:
    """A sentencepiece model; implements `runtime.tokenizer.backend.Backend`."""

    def __init__(self, file: Path, special: Mapping[str, str], turns: Sequence[int], *, begin: bool, end: bool) -> None:
        """Read the model.

        `special` maps names to special tokens. `turns` has the ids of further tokens that are recognised in texts.
        `begin` adds the BOS token before a text, `end` adds the EOS token after it. Raises ConfigurationError if the
        file cannot be read or lacks one of these tokens.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigurationError(f"{file} needs a library: pip install 'penstock[sentencepiece]'.") from error
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"{file} is not a sentencepiece model: {error}") from error
        self.base_size = self.vocab_size = int(self._model.vocab_size())
        named = [*special.values(), *(self.token(token_id) or str(token_id) for token_id in turns)]
        ids = {text: self.token_id(text) for text in named}
        self.added = {text: token_id for text, token_id in ids.items() if token_id is not None}
        if len(self.added) < len(ids):
            raise ConfigurationError(f"{file} lacks the tokens {' '.join(ids.keys() - self.added.keys())}.")
        self.special_ids = frozenset(self.added[text] for text in special.values())
        self._added_pattern = re.compile("|".join(re.escape(text) for text in self.added) or "(?!)")
        self._before = [self.added[special["bos_token"]]] if begin and "bos_token" in special else []
        self._after = [self.added[special["eos_token"]]] if end and "eos_token" in special else []
        self._adds_space = self._model.encode("a") != self._model.encode(" a") and self._strips()

    def _strips(self) -> bool:
        """Whether decoding drops a space at the beginning of a text."""
        for token_id in range(self.vocab_size):
            piece = self.token(token_id) or ""
            if piece.startswith(SPACE) and len(piece) > 1:
                return not self._model.decode([token_id]).startswith(" ")
        return False

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        encoded = [self._ids(text) for text in texts]
        if add_special_tokens:
            encoded = [[*self._before, *ids, *self._after] for ids in encoded]
        check_num_tokens(encoded, max_tokens)
        return encoded

    def _ids(self, text: str) -> list[int]:
        check_surrogates(text)
        ids, begin = [], 0
        for match in self._added_pattern.finditer(text):
            ids += [*self._model.encode(text[begin : match.start()]), self.added[match[0]]]
            begin = match.end()
        return ids + self._model.encode(text[begin:])

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        ids, more = self._ids(first), [*self._ids(second), *self._after]
        begin = len(self._before) + len(ids)
        return EncodedPair([*self._before, *ids, *more], [0] * begin + [1] * len(more), begin)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else ()
        shown = [token_id for token_id in ids if token_id not in skipped]
        text = b"".join(map(self.bytes_after, shown)).decode(errors="replace")
        return text[1:] if shown and self.bytes_of(shown[0]) != self.bytes_after(shown[0]) else text

    def token(self, token_id: int) -> str | None:
        return self._model.id_to_piece(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        token_id = int(self._model.piece_to_id(token))  # the id of the unknown token if the model lacks the piece
        return token_id if self.token(token_id) == token else None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds at the beginning of a text."""
        content = self.bytes_after(token_id)
        strips = self._adds_space and not self._model.is_byte(token_id)
        return content.removeprefix(b" ") if strips else content

    def bytes_after(self, token_id: int) -> bytes:
        """Return the bytes that a token adds after another token."""
        piece = self.token(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        if self._model.is_byte(token_id):
            return bytes.fromhex(piece[3:-1])
        return b"" if self._model.is_control(token_id) else piece.replace(SPACE, " ").encode()
