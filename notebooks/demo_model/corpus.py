"""The corpus: documents of every skill by seed, as token arrays, and the training steps drawn from them.

A step is a flat batch of groups. The documents of a group are padded to the same length.
"""

from __future__ import annotations

from collections import defaultdict
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
    """Yield `count` documents of one skill. The same seed gives the same documents."""
    rng = Random(f"{skill}/{split}/{seed}")
    for _ in range(count):
        document = SKILLS[skill].document(rng, split)
        forgets = rng.random() < 0.5
        yield _without_old_thoughts(document) if forgets else document


def _without_old_thoughts(document: Document) -> Document:
    """Remove the thoughts of earlier answers, because clients do not send them back."""
    if isinstance(document, Prose):
        return document
    *earlier, last = document.messages
    return replace(document, messages=(*(replace(message, thought=None) for message in earlier), last))


@dataclass(frozen=True)
class Encoded:
    """Documents as one long array of tokens, with marks at the tokens to learn."""

    tokens: np.ndarray  # uint16
    learnt: np.ndarray  # bool
    starts: np.ndarray  # int64 [documents + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        own = slice(self.starts[number], self.starts[number + 1])
        return self.tokens[own], self.learnt[own]


def encode(tokenizer: Tokenizer, source: Iterator[Document], longest: int) -> Encoded:
    """Tokenize each piece separately, so that the parts to learn begin with a token.

    Documents longer than `longest` tokens are left out.
    """
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
    """Yield lists of at most `size` documents."""
    while chunk := list(islice(source, size)):
        yield chunk


def _joined(pieces: Iterator[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Merge adjacent pieces of the same kind.

    When the model is served, the tokenizer also sees them as one text.
    """
    joined: list[tuple[str, bool]] = []
    for text, wanted in pieces:
        if joined and joined[-1][1] == wanted:
            joined[-1] = (joined[-1][0] + text, wanted)
        else:
            joined.append((text, wanted))
    return joined


GRAIN = 16  # lengths are padded to a multiple of this


@dataclass(frozen=True)
class Layout:
    """One step as host arrays of fixed size. The shapes do not depend on the drawn documents."""

    tokens: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    learnt_index: np.ndarray  # [N], flat positions whose next token is learnt
    targets: np.ndarray  # [N], -100 at positions without a token to learn
    groups: tuple[tuple[int, int], ...]  # (rows, length)


class Mixture:
    """Draws documents so that each skill has its share of the tokens. The documents of a skill are drawn in order."""

    def __init__(self, skills: dict[str, Encoded], shares: dict[str, float], seed: int) -> None:
        self.skills = skills
        self.rng = Random(seed)
        self.names = tuple(shares)
        lengths = {name: len(skills[name].tokens) / len(skills[name]) for name in shares}
        self.weights = [shares[name] / lengths[name] for name in shares]
        self.next_document = {name: self.rng.randrange(len(skills[name])) for name in shares}

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the next document of a skill that is drawn by weight."""
        name = self.rng.choices(self.names, self.weights)[0]
        self.next_document[name] = (self.next_document[name] + 1) % len(self.skills[name])
        return self.skills[name].document(self.next_document[name])

    def step(self, size: int, most_learnt: int) -> Layout:
        """Return documents with at most `size` tokens in total, including padding."""
        by_length: defaultdict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        room = size
        while True:
            tokens, learnt = self.draw()
            length = -(-len(tokens) // GRAIN) * GRAIN
            if length > room:
                break
            by_length[length].append((tokens, learnt))
            room -= length
        return _laid_out(by_length, size, room, most_learnt)


def _laid_out(
    by_length: dict[int, list[tuple[np.ndarray, np.ndarray]]], size: int, room: int, most_learnt: int
) -> Layout:
    flat = np.zeros(size, np.int64)
    wanted = np.zeros(size, bool)  # whether the token after this one is learnt
    positions = np.zeros(size, np.int64)
    groups, start = [], 0
    for length, rows in sorted(by_length.items()):
        for tokens, learnt in rows:
            flat[start : start + len(tokens)] = tokens
            wanted[start : start + len(tokens) - 1] = learnt[1:]
            positions[start : start + length] = np.arange(length)
            start += length
        groups.append((len(rows), length))
    if room:
        groups.append((room // GRAIN, GRAIN))
    learnt_index = np.flatnonzero(wanted)[:most_learnt]
    targets = np.full(most_learnt, -100, np.int64)
    targets[: len(learnt_index)] = flat[learnt_index + 1]
    padded = np.zeros(most_learnt, np.int64)
    padded[: len(learnt_index)] = learnt_index
    return Layout(flat, positions, padded, targets, tuple(groups))
