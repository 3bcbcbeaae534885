"""The llguidance backend. It compiles all kinds of grammars in milliseconds, and computes masks without the GIL."""

from __future__ import annotations

import heapq
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

from runtime.constraint import allow, allows, forbid, only_tokens, places_of, rows_that_allow
from runtime.grammar.backends.added_tokens import AddedTokens, added_tokens, marks_in
from runtime.grammar.backends.backend import Matcher, all_of_class
from runtime.grammar.backends.grammar_text import for_llguidance, part_for_llguidance, schemas_in, texts_of
from runtime.grammar.backends.unique_texts import QuotingTokens, UniqueTexts
from runtime.grammar.backends.vocabulary import load_vocabulary
from runtime.grammar.schema.refusals import ALTERNATIVES, REPETITIONS, TOO_LARGE, placed
from runtime.grammar.schema.unique_items import UniqueArrays
from runtime.grammar_spec import Grammar, InvalidGrammar
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("penstock.grammar")

MAX_FIRST_MASK_S = 2.0
# The backend begins two trial outputs of each compiled grammar. A grammar that exceeds llguidance's limits is thereby
# refused at once and does not fail during generation. Output i always continues with the first allowed byte of
# TRIED[i].
LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_/. "
TRIED = (b'"{[:,' + LETTERS, LETTERS + b'"{[:,')
NUM_WORDS = 16  # number of long words that the second trial output prefers to single characters
MAX_TRIED, MAX_TRIED_S = 12, 0.02
# Estimate of a compiled grammar's memory: a constant, plus bytes per character of the grammar. Measured with schemas of
# 1 to 200 KiB, and rounded up.
BASE_BYTES, BYTES_PER_CHARACTER = 64 * 1024, 64
BUILD_THREADS, BUILD_NICENESS = 2, 5
COPIES_PER_LEXER = 256
MAX_THREADS = 16  # maximum number of mask threads; half of the processors are used, but at least two
WORDS_PER_THREAD = 1024  # mask words per thread: vocabularies of up to 32,768 tokens use one thread
# llguidance's limits. Fuel is a unit of work in its lexer, which uses 14,000 to 50,000 per millisecond. A lexer state
# takes 1 to 2 KB.
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

LIMIT_WORDS = {
    "panic": TOO_LARGE,  # for example above 65,000 symbols; llguidance's own message does not help users
    "grammar size": TOO_LARGE,
    "Current row has": ALTERNATIVES,
    "Too many items": ALTERNATIVES,
    "expressions constructed": REPETITIONS,
}


class CompiledGrammar(NamedTuple):
    """The state that all matchers of a grammar share."""

    make: Callable[[], LLMatcher]  # returns a matcher at the beginning of an output, with a new lexer
    num_bytes: int
    token_bytes: Mapping[int, bytes]
    added: AddedTokens
    marks: tuple[int, ...]  # ids of the added tokens whose text occurs in the grammar


class LLGuidanceMatcher:
    """A `Matcher` of llguidance.

    All copies of a matcher share one lexer. The lexer's states accumulate over the outputs of all copies. When the
    states exceed llguidance's limits, every copy fails. A failed matcher therefore gets a new lexer and reads its
    output again from the beginning. If it fails again, its own output exceeds a limit. After every `COPIES_PER_LEXER`
    copies, a new lexer is made.
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
        self.unique = unique  # enforces `uniqueItems`, which llguidance cannot do; None: the schema has none
        self._consumed = list(consumed)
        self._num_copies = 0
        self._is_lost = False  # whether the grammar does not allow the output

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
        """Whether the grammar allows the text of this added token at the current position."""
        spelled = self.grammar.added.spelled[token_id]
        return self.inner.validate_tokens(spelled) == len(spelled)

    def _as_text(self, token_id: int) -> list[int]:
        """Return the ordinary tokens of an added token's text if the grammar expects text here, else [token_id]."""
        spelled = self.grammar.added.spelled.get(token_id)
        return [token_id] if spelled is None or self.inner.validate_tokens([token_id]) == 1 else spelled

    def _consume(self, token_ids: list[int]) -> bool:
        if not self.inner.consume_tokens(token_ids) and not (self.renew() and self.inner.consume_tokens(token_ids)):
            self._is_lost = True
            return False
        self._consumed += token_ids
        return True

    def copy(self) -> LLGuidanceMatcher:
        self._num_copies += 1
        if self.inner.is_error() or self._num_copies % COPIES_PER_LEXER == 0:
            self.renew()
        unique = None if self.unique is None else self.unique.copy()
        return LLGuidanceMatcher(self.inner.deep_copy(), self.grammar, unique, self._consumed)

    def renew(self) -> bool:
        """Replace `inner` by a matcher with a new lexer at the same position. Return False if this fails."""
        if self._is_lost:
            return False
        inner = self.grammar.make()
        if inner.is_error() or not inner.consume_tokens(self._consumed):
            return False
        self.inner = inner
        return True


class LLGuidanceBackend:
    """A `Backend` that compiles all kinds of grammars."""

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
        self._tried = [
            [ids[0] for each in characters if len(ids := vocabulary.tokenize_bytes(bytes([each]))) == 1]
            for characters in TRIED
        ]
        words = [(len(text), token_id) for token_id, text in token_bytes.items() if text.isalpha() and text.islower()]
        self._tried[1][:0] = [token_id for _, token_id in heapq.nlargest(NUM_WORDS, words)]
        self._quoting: QuotingTokens | None = None
        self._making_quoting = threading.Lock()
        self._limits = LLParserLimits(**LIMITS)
        num_threads = _num_threads(self.num_words)
        # If one thread is enough, the calling thread computes masks: waking another thread takes longer than a mask.
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._background = ThreadPoolExecutor(BUILD_THREADS, "penstock-grammar-build", _lower_priority)

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int], whitespace: str | None
    ) -> LLGuidanceBackend:
        """Create the backend. Raises `InvalidGrammar` if outputs of this tokenizer cannot be constrained."""
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
            raise InvalidGrammar(f"{special} is a special token of this model, which never occurs in an output's text")
        kept = UniqueTexts(unique, self._quoting_tokens()) if unique else None
        added = tuple(self._added.ids[mark] for mark in marks if mark in self._added.ids)
        try:
            return self._background.submit(self._build, text, kept, added).result()
        except InvalidGrammar as error:
            raise self._placed(grammar, str(error)) from error

    def _placed(self, grammar: Grammar, error: str) -> InvalidGrammar:
        """Return llguidance's error, with the place in the schema that causes it."""
        whitespace = grammar.whitespace if grammar.whitespace is not None else self._whitespace

        def refusal(schema: Any, pointer: str) -> str | None:
            try:
                text = part_for_llguidance(schema, pointer, whitespace)
            except InvalidGrammar:  # an unsupported reference in a part that outputs can omit
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
        matcher.compute_bitmask()  # the first mask also builds state that later masks need
        if matcher.is_error():  # must be checked: after an error, llguidance's mask allows the end of the output
            raise InvalidGrammar(_limit(matcher.get_error()) or "no text matches it")
        if time.perf_counter() - began_s > MAX_FIRST_MASK_S:
            raise InvalidGrammar("its first mask takes too long to compute")
        for tried in self._tried:
            _try(matcher.deep_copy(), tried, time.perf_counter() + MAX_TRIED_S)
        num_bytes = BASE_BYTES + BYTES_PER_CHARACTER * len(text)
        compiled = CompiledGrammar(make, num_bytes, self._token_bytes, self._added, marks)
        return LLGuidanceMatcher(matcher, compiled, unique)

    def close(self) -> None:
        self._background.shutdown()

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        ours = all_of_class(matchers, LLGuidanceMatcher)
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
                logger.warning("A grammar requires the text of a special token.")
                masks[rows[index]] = 0  # no token is allowed, so the output fails and does not look complete

    def _compute(self, rows: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
        num_bytes = masks.shape[1] * masks.itemsize
        first = masks.__array_interface__["data"][0]  # `masks.ctypes.data` takes three times as long
        if self._executor is not None:
            self._executor.unsafe_compute_mask_ptr(rows, first, num_bytes, len(masks))
            return
        for matcher, row in rows:
            matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)

    def _compute_anew(self, matcher: LLGuidanceMatcher, row: int, masks: NDArray[np.int32]) -> None:
        """Compute the mask of a failed matcher again, with a new lexer. If this fails too, set the row to zero."""
        if matcher.renew():
            self._compute([(matcher.inner, row)], masks)
        if matcher.inner.is_error():  # must be checked: after an error, llguidance's mask allows the end of the output
            logger.warning("A grammar cannot continue: %s", _first_line(matcher.error))
            masks[row] = 0


def _try(matcher: LLMatcher, tried: Sequence[int], until_s: float) -> None:
    """Begin a trial output: repeatedly append the first token in `tried` that the grammar allows.

    Raises `InvalidGrammar` if llguidance fails.
    """
    for _ in range(MAX_TRIED):
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        token_id = next((each for each in tried if allows(mask, each)), None)
        if token_id is not None:
            matcher.consume_token(token_id)
        if matcher.is_error():
            raise InvalidGrammar(_first_line(matcher.get_error()))
        if token_id is None or matcher.is_stopped() or time.perf_counter() > until_s:
            return


def _is_special_text(inner: LLMatcher, token_id: int) -> bool:
    """Whether the grammar requires the text of the only allowed token, `token_id`, but refuses the token itself."""
    return not inner.is_stopped() and inner.validate_tokens([token_id]) == 0


def _forbid_dead_ends(inner: LLMatcher, unique: UniqueTexts, mask: NDArray[np.int32]) -> None:
    """Forbid each token after which the current string equals an earlier string and can only end."""
    for token_id in unique.repeating(mask):
        after = inner.deep_copy()
        after.consume_token(token_id)
        allowed = np.frombuffer(after.compute_bitmask(), np.int32)[: len(mask)]
        if not (allowed & unique.goes_on).any():
            forbid(mask, [token_id])


def _lower_priority() -> None:
    """Lower this thread's priority. The thread computes without the GIL, so the event loop never waits for it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BUILD_NICENESS)


def _num_threads(num_words: int) -> int:
    """Return the number of mask threads. Computing a small mask takes less time than waking a second thread."""
    num_processors = os.cpu_count() or 1
    most = min(num_processors, MAX_THREADS, max(2, num_processors // 2))
    return min(most, -(-num_words // WORDS_PER_THREAD))


def _limit(error: str) -> str | None:
    """Return the text for clients if the error is about a limit of llguidance, else None."""
    return next((words for said, words in LIMIT_WORDS.items() if said in error), None)


def _first_line(error: str) -> str:
    """Return llguidance's error for clients, without the dump of its state."""
    if limit := _limit(error):
        return limit
    lines = [line.strip() for line in error.split("\n<state>")[0].splitlines() if line.strip()]
    return " ".join(lines)[:500] or "the grammar cannot be compiled"
