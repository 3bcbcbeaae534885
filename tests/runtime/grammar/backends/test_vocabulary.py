"""Token classes, which the grammar library allows as a whole, do not change any mask."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import grammars
from runtime.grammar.backends.grammar_text import for_llguidance
from runtime.grammar.backends.vocabulary import load_vocabulary
from runtime.grammar_spec import Grammar

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def vocabularies() -> tuple[LLTokenizer, LLTokenizer]:
    """Return the backend's vocabulary, and the same vocabulary without classes."""
    tokenizer = grammars.tokenizer()
    ours, _ = load_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    return ours, ours.with_slices([])


@pytest.mark.parametrize(
    "schema",
    [
        {"maxLength": 30},
        {"maxLength": 3},
        {"pattern": "^[a-z]+$"},
        {"pattern": "^[A-Za-z]{1,20}$"},
        {"pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        {"pattern": "^[A-Za-z ]{1,40}$"},
        {"pattern": "^[a-zA-Z0-9 .]{13,}$"},
        {"pattern": "^\\w+$", "maxLength": 20},
    ],
    ids=json.dumps,
)
def test_classes_of_tokens_change_no_mask(
    vocabularies: tuple[LLTokenizer, LLTokenizer], schema: dict[str, Any]
) -> None:
    text = for_llguidance(Grammar("json_schema", json.dumps({"type": "string", **schema})), None, {})
    chance = random.Random(0)
    for _ in range(4):
        matchers = [LLMatcher(vocabulary, text) for vocabulary in vocabularies]
        for _ in range(NUM_TOKENS):
            mask, one_by_one = (np.frombuffer(matcher.compute_bitmask(), np.uint8) for matcher in matchers)
            assert (mask == one_by_one).all()
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matchers[0].is_stopped():
                break
            token = int(chance.choice(allowed))
            assert all(matcher.consume_token(token) for matcher in matchers)
