"""The grammar compiler of an engine, by its plan."""

from __future__ import annotations

from functools import partial

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.grammar.backend import Backend
from runtime.grammar.compiler import GrammarCompiler
from runtime.tokenizer.tokenizer import Tokenizer


def load_grammars(
    plan: Plan, facts: ModelFacts, tokenizer: Tokenizer | None, eos_ids: frozenset[int]
) -> GrammarCompiler | None:
    """None where this engine constrains no outputs. Loads nothing yet."""
    if tokenizer is None or plan.tokenizer.grammar_backend == "none":
        return None
    load = partial(_load, plan, facts, tokenizer, eos_ids)
    return GrammarCompiler(load, tokenizer, facts.vocab_size, eos_ids, plan.scheduler.max_forced)


def _load(plan: Plan, facts: ModelFacts, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Backend:
    from runtime.grammar.with_llguidance import LLGuidanceBackend

    return LLGuidanceBackend.load(tokenizer, facts.vocab_size, eos_ids, plan.tokenizer.json_whitespace)
