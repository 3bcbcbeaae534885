"""The outlines-core backend. It compiles plain JSON schemas and choices to finite automata over the vocabulary."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allow
from runtime.grammar.backends.automaton_cache import AutomatonCache
from runtime.grammar.backends.backend import Matcher, all_of_class, refused
from runtime.grammar.backends.plain_schema import Enforced, plain_schema
from runtime.grammar.backends.vocabulary import text_tokens
from runtime.grammar.schema import json_text
from runtime.grammar.schema.references import Unsupported
from runtime.grammar_spec import Grammar, InvalidGrammar, check_whitespace
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outlines_core import Index  # pyright: ignore[reportMissingImports]

ENFORCED = Enforced(
    {
        "null": frozenset(),
        "boolean": frozenset(),
        "integer": frozenset(),
        "number": frozenset(),
        "string": frozenset(),
        "array": frozenset({"items", "minItems", "maxItems"}),
        "object": frozenset({"properties", "required", "additionalProperties"}),
    },
    # A schema of this size takes 3 s with 150,000 tokens: each character is a state, and each state visits all tokens.
    max_size=1_000,
    text_size=50,  # the state of a string stores nearly all tokens: 2 MB for 150,000 tokens
)
BYTES_PER_STATE = 0.4  # average bytes per state and token of the vocabulary; a string counts as `text_size` states
WHITESPACE = "[ ]?"


class OutlinesMatcher:
    """A `Matcher` of outlines-core."""

    __slots__ = ("_eos_ids", "_index", "_token_ids", "ended", "error", "inner", "num_bytes")

    def __init__(self, index: Index, eos_ids: Sequence[int], num_bytes: int) -> None:
        from outlines_core import Guide  # pyright: ignore[reportMissingImports]

        self._index = index
        self._eos_ids = eos_ids
        self.ended = False
        self.num_bytes = num_bytes
        self._token_ids: list[int] = []
        self.inner = Guide(index, 0)
        self.error = ""

    def consume(self, token_ids: Sequence[int]) -> bool:
        self.error = self.error or refused(token_ids, self._advance)
        # Tokens after a refused token are kept too, so that a copy fails at the same place.
        self._token_ids += token_ids
        return not self.error

    def _advance(self, token_id: int) -> bool:
        # outlines-core supports only one end-of-sequence id, so this class handles all end-of-sequence ids itself.
        if token_id in self._eos_ids:
            self.ended = self.inner.is_finished()
            return self.ended
        if self.ended:
            return False
        try:
            self.inner.advance(token_id, return_tokens=False)
        except ValueError:
            return False
        return True

    def copy(self) -> OutlinesMatcher:
        found = OutlinesMatcher(self._index, self._eos_ids, self.num_bytes)
        found.consume(self._token_ids)
        found.error = self.error
        return found


class OutlinesBackend:
    """A `Backend` for plain JSON schemas and choices."""

    matcher = OutlinesMatcher

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: Iterable[int],
        whitespace: str | None,
        cache: AutomatonCache | None = None,
    ) -> None:
        import outlines_core  # pyright: ignore[reportMissingImports]

        self.num_words = -(-len(tokens) // 32)
        self._library = outlines_core
        self._whitespace = whitespace
        self._cache = cache
        self._eos_ids = sorted(eos_ids)
        self._name = (  # part of every automaton's cache key
            outlines_core.__name__.encode() + version("outlines-core").encode(),
            hashlib.sha256(b"".join(len(token).to_bytes(4, "little") + token for token in tokens)).digest(),
            repr(self._eos_ids).encode(),
        )
        ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(tokens):
            if token:
                ids.setdefault(token, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(self._eos_ids[0], ids)

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        whitespace: str | None,
        cache: AutomatonCache | None = None,
    ) -> OutlinesBackend:
        """Create the backend. Raises `InvalidGrammar` if outputs of this tokenizer cannot be constrained."""
        tokens, ends = text_tokens(tokenizer, vocab_size, eos_ids)
        return cls(tokens, ends, whitespace, cache)

    def compile(self, grammar: Grammar) -> OutlinesMatcher:
        """Compile a plain schema or a choice. Raises `Unsupported` for grammars that llguidance compiles instead."""
        regex, size = self._regex(grammar)
        try:
            automaton = self._automaton(regex)
        except ValueError as error:
            raise InvalidGrammar(str(error).splitlines()[0][:500]) from error
        num_bytes = int(BYTES_PER_STATE * size * 32 * self.num_words)
        return OutlinesMatcher(automaton, self._eos_ids, num_bytes)

    def _automaton(self, regex: str) -> Index:
        """Return the automaton of a regular expression, from disk if it is cached."""
        key = (*self._name, regex.encode())
        kept = self._cache.get(key) if self._cache is not None else None
        if kept is not None:
            return self._library.Index.from_binary(kept)
        found = self._library.Index(regex, self._vocabulary)
        if self._cache is not None:
            _, [content] = found.__reduce__()
            self._cache.put(key, bytes(content))
        return found

    def _regex(self, grammar: Grammar) -> tuple[str, int]:
        """Return the regular expression of a grammar, and its size in the unit of `plain_schema`."""
        from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports]

        if grammar.kind == "choice":
            texts = json_text.parse(grammar.source)
            if isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts):
                size = sum(map(len, texts))
                if size <= ENFORCED.max_size:
                    return "|".join(map(re.escape, texts)), size
            raise Unsupported("choice", "", "it is no short list of texts")
        if grammar.kind != "json_schema":
            raise Unsupported(grammar.kind, "", "only JSON schemas and choices are compiled there")
        pattern = grammar.whitespace if grammar.whitespace is not None else self._whitespace
        blanks = WHITESPACE if pattern is None else f"(?:{check_whitespace(pattern)})?"
        schema, size = plain_schema(grammar.source, ENFORCED)
        return build_regex_from_schema(json.dumps(schema), whitespace_pattern=blanks), size

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        for row, matcher in enumerate(all_of_class(matchers, OutlinesMatcher)):
            if matcher.error:
                masks[row] = 0
                continue
            if matcher.ended:
                masks[row] = 0
            else:
                matcher.inner.write_mask_into(masks[row].ctypes.data, masks.shape[1], 4)
            if matcher.inner.is_finished():
                allow(masks[row], self._eos_ids)

    def close(self) -> None:
        """Do nothing, because the backend has no threads."""
