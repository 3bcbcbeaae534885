"""The xgrammar backend. It compiles JSON schemas that have only keywords which xgrammar is known to enforce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allow
from runtime.grammar.backends.backend import Matcher, all_of_class, refused
from runtime.grammar.backends.plain_schema import Enforced, plain_schema
from runtime.grammar.backends.vocabulary import text_tokens
from runtime.grammar.schema.references import Unsupported
from runtime.grammar_spec import Grammar, InvalidGrammar
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar  # pyright: ignore[reportMissingImports]

# `minLength` and `maxLength` are left out, because with them xgrammar allows control characters, which JSON forbids.
ENFORCED = Enforced(
    {
        "null": frozenset(),
        "boolean": frozenset(),
        "integer": frozenset({"minimum", "maximum"}),
        "number": frozenset(),
        "string": frozenset(),
        "array": frozenset({"items", "minItems", "maxItems"}),
        "object": frozenset({"properties", "required", "additionalProperties"}),
    },
    max_size=4_000,
)
MAX_BLANKS = 20  # maximum number of whitespace characters between two JSON tokens
COMPILE_THREADS = 2
# Limit of xgrammar's own cache, which holds parts of grammars. `GrammarCompiler` caches whole grammars.
CACHE_BYTES = 64 * 1024 * 1024


class XGrammarMatcher:
    """A `Matcher` of xgrammar."""

    __slots__ = ("error", "inner", "num_bytes")

    def __init__(self, inner: xgrammar.GrammarMatcher, num_bytes: int) -> None:
        self.inner = inner
        self.num_bytes = num_bytes
        self.error = ""

    def consume(self, token_ids: Sequence[int]) -> bool:
        self.error = self.error or refused(token_ids, self.inner.accept_token)
        return not self.error

    def copy(self) -> XGrammarMatcher:
        found = XGrammarMatcher(self.inner.fork(), self.num_bytes)
        found.error = self.error
        return found


class XGrammarBackend:
    """A `Backend` for plain JSON schemas."""

    matcher = XGrammarMatcher

    def __init__(self, tokens: Sequence[bytes], eos_ids: Iterable[int], whitespace: str | None) -> None:
        import xgrammar  # pyright: ignore[reportMissingImports]

        self.num_words = -(-len(tokens) // 32)
        self._library = xgrammar
        self._whitespace = whitespace
        self._eos_ids = sorted(eos_ids)
        vocabulary = xgrammar.TokenizerInfo(list(tokens), stop_token_ids=self._eos_ids)
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES
        )

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int], whitespace: str | None
    ) -> XGrammarBackend:
        """Create the backend. Raises `InvalidGrammar` if outputs of this tokenizer cannot be constrained."""
        tokens, ends = text_tokens(tokenizer, vocab_size, eos_ids)
        return cls(tokens, ends, whitespace)

    def compile(self, grammar: Grammar) -> XGrammarMatcher:
        """Compile a plain JSON schema. Raises `Unsupported` for grammars that llguidance compiles instead."""
        if grammar.kind != "json_schema":
            raise Unsupported(grammar.kind, "", "only JSON schemas are compiled there")
        blanks = self._blanks(grammar.whitespace if grammar.whitespace is not None else self._whitespace)
        schema, _ = plain_schema(grammar.source, ENFORCED)
        try:
            compiled = self._compiler.compile_json_schema(schema, strict_mode=True, **blanks)
        except RuntimeError as error:
            raise InvalidGrammar(str(error).splitlines()[0][:500]) from error
        return XGrammarMatcher(self._library.GrammarMatcher(compiled), compiled.memory_size_bytes)

    def _blanks(self, pattern: str | None) -> dict[str, Any]:
        if pattern is None:
            return {"any_whitespace": True, "max_whitespace_cnt": MAX_BLANKS}
        if pattern == "":
            return {"any_whitespace": False, "separators": (",", ":")}
        raise Unsupported("whitespace_pattern", "", "only none and the default are known there")

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        # Masks are computed one by one: two mask threads call this method, and xgrammar's batch matcher is not
        # thread-safe.
        for row, matcher in enumerate(all_of_class(matchers, XGrammarMatcher)):
            if matcher.error:
                masks[row] = 0
            elif matcher.inner.is_terminated():
                masks[row] = 0
                allow(masks[row], self._eos_ids)
            else:
                matcher.inner.fill_next_token_bitmask(masks, row)

    def close(self) -> None:
        """Do nothing, because the backend has no threads."""
