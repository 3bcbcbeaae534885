"""The llguidance backend: every kind of grammar, compiled in milliseconds, masks in parallel without Python's lock."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import allow, forbid, only_tokens, places_of, rows_that_allow
from runtime.grammar.added_tokens import AddedTokens, added_tokens, marks_in
from runtime.grammar.backend import Matcher
from runtime.grammar.llguidance_text import for_llguidance, part_for_llguidance, schemas_in, texts_of
from runtime.grammar.refusals import placed
from runtime.grammar.unique_items import UniqueArrays
from runtime.grammar.unique_texts import QuotingTokens, UniqueTexts
from runtime.grammar.vocabulary import load_vocabulary
from runtime.grammar_spec import Grammar, InvalidGrammar
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("penstock.grammar")

MAX_FIRST_MASK_S = 2.0
# What a compiled grammar takes: measured with schemas of 1 to 200 KiB, rounded up.
BASE_BYTES, BYTES_PER_CHARACTER = 64 * 1024, 64
BUILD_THREADS, BUILD_NICENESS = 2, 5
COPIES_OF_A_LEXER = 256
MAX_THREADS = 16  # that compute masks, on half of the processors
WORDS_OF_A_THREAD = 1024  # of a mask: one thread up to 32,768 tokens
# The library's units: fuel is work in its lexer, 14,000 to 50,000 a millisecond; a state takes one to two kilobytes.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


class CompiledGrammar(NamedTuple):
    """What all matchers of a grammar have in common."""

    make: Callable[[], LLMatcher]  # one at the beginning of an output, with a lexer of its own
    num_bytes: int
    token_bytes: Mapping[int, bytes]
    added: AddedTokens
    marks: tuple[int, ...]  # added tokens whose texts the grammar writes


class LLGuidanceMatcher:
    """See `Matcher`.

    All copies of a matcher share one lexer, whose states grow with all of their outputs: where one output exceeds its
    limits, every copy is broken from then on. So whoever finds itself broken begins anew with a lexer of its own, and
    only what fails then too is its own failure; and after some copies the next ones get a new lexer.
    """

    __slots__ = ("_consumed", "_is_lost", "_num_copies", "grammar", "inner", "unique")

    def __init__(
        self,
        inner: LLMatcher,
        grammar: CompiledGrammar,
        unique: UniqueTexts | None = None,
        consumed: Iterable[int] = (),
    ) -> None:
        self.inner = inner
        self.grammar = grammar
        self.unique = unique  # what the library cannot enforce
        self._consumed = list(consumed)
        self._num_copies = 0
        self._is_lost = False  # whether tokens came that the grammar does not allow

    @property
    def num_bytes(self) -> int:
        return self.grammar.num_bytes

    @property
    def error(self) -> str:
        return self.inner.get_error()

    def consume(self, token_ids: list[int]) -> bool:
        if self.unique is not None:
            self.unique.feed(map(self.grammar.token_bytes.__getitem__, token_ids))
        if self.grammar.added.spelled.keys().isdisjoint(token_ids):
            return self._consume(token_ids)
        return all(self._consume(self._as_text(token_id)) for token_id in token_ids)

    def spells(self, token_id: int) -> bool:
        """Whether the text of this added token may be written here."""
        spelled = self.grammar.added.spelled[token_id]
        return self.inner.validate_tokens(spelled) == len(spelled)

    def _as_text(self, token_id: int) -> list[int]:
        """An added token as the library understands it here: itself, or the tokens of its text."""
        spelled = self.grammar.added.spelled.get(token_id)
        return [token_id] if spelled is None or self.inner.validate_tokens([token_id]) == 1 else spelled

    def _consume(self, token_ids: list[int]) -> bool:
        if not self.inner.consume_tokens(token_ids) and not (
            self.renew() and self.inner.consume_tokens(token_ids)
        ):
            self._is_lost = True
            return False
        self._consumed += token_ids
        return True

    def copy(self) -> LLGuidanceMatcher:
        self._num_copies += 1
        if self.inner.is_error() or self._num_copies % COPIES_OF_A_LEXER == 0:
            self.renew()
        unique = None if self.unique is None else self.unique.copy()
        return LLGuidanceMatcher(self.inner.deep_copy(), self.grammar, unique, self._consumed)

    def renew(self) -> bool:
        """Come to the same place with a lexer of its own; False where that fails."""
        if self._is_lost:
            return False
        inner = self.grammar.make()
        if inner.is_error() or not inner.consume_tokens(self._consumed):
            return False
        self.inner = inner
        return True


class LLGuidanceBackend:
    """See `Backend`."""

    matcher = LLGuidanceMatcher

    def __init__(
        self,
        vocabulary: LLTokenizer,
        whitespace: str | None,
        token_bytes: Mapping[int, bytes],
        added: AddedTokens,
    ) -> None:
        from llguidance import LLExecutor, LLParserLimits

        self.num_words = -(-vocabulary.vocab_size // 32)
        self._vocabulary = vocabulary
        self._whitespace = whitespace
        self._token_bytes = token_bytes
        self._added = added
        self._special = places_of([*added.special.values(), *vocabulary.eos_tokens])
        self._quoting: QuotingTokens | None = None
        self._making_quoting = threading.Lock()
        self._limits = LLParserLimits(**LIMITS)
        num_threads = _num_threads(self.num_words)
        # Alone, the thread that asks computes: handing it to another one and waiting takes longer than most masks.
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._background = ThreadPoolExecutor(BUILD_THREADS, "penstock-grammar-build", _let_others_go_first)

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int], whitespace: str | None
    ) -> LLGuidanceBackend:
        """Raises `InvalidGrammar` where outputs of this tokenizer cannot be constrained."""
        eos_ids = [*eos_ids]
        vocabulary, table = load_vocabulary(tokenizer, vocab_size, eos_ids)
        added = added_tokens(vocabulary, table, tokenizer.special_ids | {*eos_ids})
        return cls(vocabulary, whitespace, table.rest, added)

    def compile(self, grammar: Grammar) -> LLGuidanceMatcher:
        unique: UniqueArrays = {}
        text = for_llguidance(grammar, self._whitespace, unique)
        marks = marks_in(texts_of(text))
        special = next((mark for mark in marks if mark in self._added.special), None)
        if special is not None:
            raise InvalidGrammar(
                f"{special} is a special token of this model, which no text of an output holds"
            )
        kept = UniqueTexts(unique, self._quoting_tokens()) if unique else None
        added = tuple(self._added.ids[mark] for mark in marks if mark in self._added.ids)
        try:
            return self._background.submit(self._build, text, kept, added).result()
        except InvalidGrammar as error:
            raise self._placed(grammar, str(error)) from error

    def _placed(self, grammar: Grammar, error: str) -> InvalidGrammar:
        """What the library says of a grammar, with the place in the schema that it is about."""
        whitespace = grammar.whitespace if grammar.whitespace is not None else self._whitespace

        def refusal(schema: Any, pointer: str) -> str | None:
            try:
                text = part_for_llguidance(schema, pointer, whitespace)
            except InvalidGrammar:  # what it refers to is not enforced, and was not needed
                return None
            try:
                self._background.submit(self._build, text, None).result()
            except InvalidGrammar as refused:
                return str(refused)
            return None

        return placed(schemas_in(grammar), error, refusal)

    def _quoting_tokens(self) -> QuotingTokens:
        with self._making_quoting:
            if self._quoting is None:
                self._quoting = QuotingTokens(self._token_bytes, 32 * self.num_words)
            return self._quoting

    def _build(self, text: str, unique: UniqueTexts | None, marks: tuple[int, ...] = ()) -> LLGuidanceMatcher:
        from llguidance import LLMatcher

        def make() -> LLMatcher:
            return LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)

        matcher = make()
        if matcher.is_error():
            raise InvalidGrammar(_first_line(matcher.get_error()))
        began_s = time.perf_counter()
        matcher.compute_bitmask()  # here and not beside the steps: the first one prepares much of what others need
        if matcher.is_error():  # the library then allows the end, as if the output were whole
            raise InvalidGrammar("no text matches it")
        if time.perf_counter() - began_s > MAX_FIRST_MASK_S:
            raise InvalidGrammar("its first token takes too long to find")
        num_bytes = BASE_BYTES + BYTES_PER_CHARACTER * len(text)
        compiled = CompiledGrammar(make, num_bytes, self._token_bytes, self._added, marks)
        return LLGuidanceMatcher(matcher, compiled, unique)

    def close(self) -> None:
        self._background.shutdown()

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        ours = [matcher for matcher in matchers if isinstance(matcher, LLGuidanceMatcher)]
        self._compute([(matcher.inner, row) for row, matcher in enumerate(ours)], masks)
        for row, matcher in enumerate(ours):
            if matcher.inner.is_error():
                self._compute_anew(matcher, row, masks)
            if matcher.grammar.marks:
                allow(masks[row], filter(matcher.spells, matcher.grammar.marks))
            if matcher.unique is not None:
                matcher.unique.restrict(masks[row])
                _forbid_dead_ends(matcher.inner, matcher.unique, masks[row])
        rows = [*rows_that_allow(masks[: len(ours)], self._special)]
        for index, token_id in only_tokens(masks[rows]).items():
            if _is_special_text(ours[rows[index]].inner, token_id):
                logger.warning("A grammar wants the text of a special token.")
                masks[rows[index]] = 0  # not even an end is allowed

    def _compute(self, rows: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
        num_bytes = masks.shape[1] * masks.itemsize
        first = masks.__array_interface__["data"][0]  # as `masks.ctypes.data`, in a third of the time
        if self._executor is not None:
            self._executor.unsafe_compute_mask_ptr(rows, first, num_bytes, len(masks))
            return
        for matcher, row in rows:
            matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)

    def _compute_anew(self, matcher: LLGuidanceMatcher, row: int, masks: NDArray[np.int32]) -> None:
        """With a lexer of its own. Where that fails too, nothing is allowed."""
        if matcher.renew():
            self._compute([(matcher.inner, row)], masks)
        if matcher.inner.is_error():  # the library then allows the end, as if the output were whole
            logger.warning("A grammar can go no further: %s", _first_line(matcher.error))
            masks[row] = 0


def _is_special_text(inner: LLMatcher, token_id: int) -> bool:
    """Whether this token, the only one that is allowed, is forced as text: the grammar does not take it as a token."""
    return not inner.is_stopped() and inner.validate_tokens([token_id]) == 0


def _forbid_dead_ends(inner: LLMatcher, unique: UniqueTexts, mask: NDArray[np.int32]) -> None:
    """Those tokens that make a text one of those before where the grammar then lets it end only."""
    for token_id in unique.repeating(mask):
        behind = inner.deep_copy()
        behind.consume_token(token_id)
        allowed = np.frombuffer(behind.compute_bitmask(), np.int32)[: len(mask)]
        if not (allowed & unique.goes_on).any():
            forbid(mask, [token_id])


def _let_others_go_first() -> None:
    """Lower this thread's priority: it computes without Python's lock, so the event loop need not wait for it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BUILD_NICENESS)


def _num_threads(num_words: int) -> int:
    """That compute masks. Of few words each takes microseconds, and waking a second thread more than it saves."""
    num_processors = os.cpu_count() or 1
    most = min(num_processors, MAX_THREADS, max(2, num_processors // 2))
    return min(most, -(-num_words // WORDS_OF_A_THREAD))


def _first_line(error: str) -> str:
    """What a client may read: without the dump of the library's state."""
    if error.startswith("panic"):  # of the library, as beyond 65,000 symbols: what it says is for its authors
        return "it is too large for the library that compiles it"
    lines = [line.strip() for line in error.split("\n<state>")[0].splitlines() if line.strip()]
    return " ".join(lines)[:500] or "the grammar cannot be compiled"
