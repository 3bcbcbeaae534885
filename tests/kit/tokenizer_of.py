"""A folder's tokenizer, without an engine."""

from __future__ import annotations

from runtime.config.plan import TokenizerPlan
from runtime.tokenizer.backend import read_tokenizer
from runtime.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    plan = TokenizerPlan(
        tokenizer_path=path, mode="auto", trust_remote_code=False, revision=None, chat_template=None
    )
    files = read_tokenizer(plan)
    return Tokenizer(files.backend, files.special)
