"""The corpus: documents of every skill by seed, as token arrays, and the steps drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from demo_model.conversation import Document, Prose, Split, render
from demo_model.skills import (
    arguments,
    arithmetic,
    conversions,
    dialogue,
    extraction,
    penstock,
    refusal,
    repeating,
    stories,
    tables,
    tools,
)  # fmt: skip

SKILLS: dict[str, Any] = {
    "arguments": arguments,
    "arithmetic": arithmetic,
    "conversions": conversions,
    "dialogue": dialogue,
    "extraction": extraction,
    "penstock": penstock,
    "refusal": refusal,
    "repeating": repeating,
    "stories": stories,
    "tables": tables,
    "tools": tools,
}


def documents(skill: str, seed: int, count: int, split: Split = "train") -> Iterator[Document]:
    """`count` documents of one skill; the same seed gives the same documents."""
    rng = Random(f"{skill}/{split}/{seed}")
    for _ in range(count):
        document = SKILLS[skill].document(rng, split)
        forgets = rng.random() < 0.5
        yield _without_old_thoughts(document) if forgets else document


def _without_old_thoughts(document: Document) -> Document:
    """Clients send earlier answers back without their thoughts."""
    if isinstance(document, Prose):
        return document
    *earlier, last = document.messages
    return replace(document, messages=(*(replace(message, thought=None) for message in earlier), last))


@dataclass(frozen=True)
class Encoded:
    """Documents as one long array of tokens with the marks of what is to be learnt."""

    tokens: np.ndarray  # uint16
    learnt: np.ndarray  # bool
    starts: np.ndarray  # int64, one more than documents

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.starts[place], self.starts[place + 1])
        return self.tokens[span], self.learnt[span]


def encode(tokenizer: Tokenizer, source: Iterator[Document], longest: int) -> Encoded:
    """Tokenise piece by piece, so that what is learnt begins at a token; longer documents are left out."""
    tokens: list[np.ndarray] = []
    learnt: list[np.ndarray] = []
    for chunk in batched(source, 1000):
        pieces = [_joined(render(document)) for document in chunk]
        encodings = iter(tokenizer.encode_batch_fast([text for piece in pieces for text, _ in piece]))
        for piece in pieces:
            ids = [(next(encodings).ids, wanted) for _, wanted in piece]
            if sum(len(part) for part, _ in ids) <= longest:
                tokens.append(np.concatenate([np.array(part, np.uint16) for part, _ in ids]))
                learnt.append(np.concatenate([np.full(len(part), wanted) for part, wanted in ids]))
    starts = np.cumsum([0, *(len(ids) for ids in tokens)], dtype=np.int64)
    return Encoded(np.concatenate(tokens), np.concatenate(learnt), starts)


def batched(source: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Lists of at most `size` documents."""
    while chunk := list(islice(source, size)):
        yield chunk


def _joined(pieces: Iterator[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours of one kind become one piece, as the tokenizer sees them at serving time."""
    joined: list[tuple[str, bool]] = []
    for text, wanted in pieces:
        if joined and joined[-1][1] == wanted:
            joined[-1] = (joined[-1][0] + text, wanted)
        else:
            joined.append((text, wanted))
    return joined
