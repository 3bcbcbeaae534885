"""Decide whether texts match a grammar, token by token, like the engine."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np

from runtime.config.plan import TokenizerPlan
from runtime.grammar.backends.backend import Backend, Matcher
from runtime.grammar.backends.with_llguidance import LLGuidanceBackend, LLGuidanceMatcher
from runtime.grammar_spec import Grammar
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer.tokenizer import Tokenizer
from serve.demo import demo_path


def load_tokenizer(path: str) -> Tokenizer:
    plan = TokenizerPlan(tokenizer_path=path, mode="auto", trust_remote_code=False, revision=None, chat_template=None)
    files = read_tokenizer(plan)
    return Tokenizer(files.backend, files.special)


@cache
def tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer."""
    return load_tokenizer(str(demo_path()))


@cache
def backend() -> LLGuidanceBackend:
    found = tokenizer()
    return LLGuidanceBackend.load(found, found.vocab_size, found.eos_ids, None)


def compiled(kind: Any, source: Any = "", **options: Any) -> LLGuidanceMatcher:
    """Compile the grammar. Raises `InvalidGrammar`."""
    text = source if isinstance(source, str) and kind != "choice" else json.dumps(source)
    return backend().compile(Grammar(kind, text, **options))


def accepts(matcher: Matcher, text: str, by: Backend | None = None) -> bool:
    """Whether the text, tokenized by the tokenizer, is a complete output."""
    [ids] = tokenizer().encode_batch([text], add_special_tokens=False)
    return accepts_ids(matcher, ids, by)


def accepts_ids(matcher: Matcher, ids: list[int], by: Backend | None = None) -> bool:
    """Whether the masks allow each token at its position, and then the end."""
    found = matcher.copy()
    for token_id in ids:
        if token_id not in allowed(found, by):
            return False
        found.consume([token_id])
    return bool(allowed(found, by) & tokenizer().eos_ids)


def allowed(matcher: Matcher, by: Backend | None = None) -> set[int]:
    """Return the tokens that may come next, computed by the matcher's backend (llguidance by default)."""
    mask = np.zeros((1, backend().num_words), np.int32)
    (by or backend()).fill_masks([matcher], mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")).tolist())


def random_output(matcher: Matcher, seed: int, max_tokens: int = 400, by: Backend | None = None) -> str | None:
    """Return a text that the masks allow, ended as soon as possible after a while; None if it became too long."""
    chance = random.Random(seed)
    found, ends = matcher.copy(), tokenizer().eos_ids
    ids: list[int] = []
    while len(ids) < max_tokens:
        choices = allowed(found, by)
        if not choices:
            raise ValueError(f"nothing is allowed: {found.error}")
        if choices & ends and (len(choices) == len(choices & ends) or chance.random() < 0.2):
            return tokenizer().decode(ids)
        choices -= ends
        # Prefer tokens that can end a structure (quotes, brackets, digits), so that texts do not grow without limit.
        short = [token_id for token_id in choices if len(tokenizer().bytes_of.rest[token_id]) <= 2]  # pyright: ignore
        token_id = chance.choice(sorted(short if short and chance.random() < 0.7 else choices))
        ids.append(token_id)
        found.consume([token_id])
    return None
