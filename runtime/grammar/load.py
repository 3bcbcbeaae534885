"""Create an engine's grammar compiler from its plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.grammar.backends.backend import Backend, Matcher
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.schema.references import Unsupported
from runtime.grammar_spec import Grammar
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.grammar")


def load_grammars(
    plan: Plan, facts: ModelFacts, tokenizer: Tokenizer | None, eos_ids: frozenset[int]
) -> GrammarCompiler | None:
    """Return the compiler, or None if the engine has no tokenizer or no grammar backend. Loads no backend yet."""
    if tokenizer is None or plan.tokenizer.grammar_backend == "none":
        return None
    load = partial(_load, plan, facts, tokenizer, eos_ids)
    return GrammarCompiler(load, tokenizer, facts.vocab_size, eos_ids, plan.scheduler.max_forced)


def _load(plan: Plan, facts: ModelFacts, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Backend:
    from runtime.grammar.backends.with_llguidance import LLGuidanceBackend

    chosen, whitespace = plan.tokenizer.grammar_backend, plan.tokenizer.json_whitespace
    everything = LLGuidanceBackend.load(tokenizer, facts.vocab_size, eos_ids, whitespace)
    if chosen == "xgrammar":
        from runtime.grammar.backends.with_xgrammar import XGrammarBackend

        return FirstOf(XGrammarBackend.load(tokenizer, facts.vocab_size, eos_ids, whitespace), everything)
    if chosen == "outlines":
        from runtime.grammar.backends.automaton_cache import AutomatonCache
        from runtime.grammar.backends.with_outlines import OutlinesBackend

        cache = None if plan.tokenizer.memory_only_automata else AutomatonCache()
        return FirstOf(OutlinesBackend.load(tokenizer, facts.vocab_size, eos_ids, whitespace, cache), everything)
    return everything


class FirstOf:
    """A `Backend` that combines two backends. The second compiles each grammar that the first does not support."""

    matcher = object

    def __init__(self, first: Backend, second: Backend) -> None:
        self._first = first
        self._second = second
        self.num_words = second.num_words

    def compile(self, grammar: Grammar) -> Matcher:
        try:
            return self._first.compile(grammar)
        except Unsupported as error:
            logger.debug("The second backend compiles a grammar: %s", error)
            return self._second.compile(grammar)

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        mine = [row for row, matcher in enumerate(matchers) if isinstance(matcher, self._first.matcher)]
        for backend, rows in ((self._first, mine), (self._second, sorted({*range(len(matchers))} - {*mine}))):
            if len(rows) == len(matchers):
                backend.fill_masks(matchers, masks)
            elif rows:
                part = np.zeros((len(rows), masks.shape[1]), np.int32)
                backend.fill_masks([matchers[row] for row in rows], part)
                masks[rows] = part

    def close(self) -> None:
        self._first.close()
        self._second.close()
