"""The corpus: documents of every skill by seed, as token arrays, and the steps of training drawn from them.

A step is laid out flat, in groups of documents of one padded length.
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

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        own = slice(self.starts[number], self.starts[number + 1])
        return self.tokens[own], self.learnt[own]


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


GRAIN = 16  # lengths are padded to a multiple of this


@dataclass(frozen=True)
class Layout:
    """One step as host arrays of fixed size: whatever was drawn, the shapes stay the same."""

    tokens: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    learnt_index: np.ndarray  # [N], where in the flat tokens the next one is learnt
    targets: np.ndarray  # [N], -100 where nothing is learnt
    groups: tuple[tuple[int, int], ...]  # rows, length


class Mixture:
    """Draws documents so that each skill has its share of the tokens; every skill is walked in order."""

    def __init__(self, skills: dict[str, Encoded], shares: dict[str, float], seed: int) -> None:
        self.skills = skills
        self.rng = Random(seed)
        self.names = tuple(shares)
        lengths = {name: len(skills[name].tokens) / len(skills[name]) for name in shares}
        self.weights = [shares[name] / lengths[name] for name in shares]
        self.next_document = {name: self.rng.randrange(len(skills[name])) for name in shares}

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """The next document of a skill drawn by weight."""
        name = self.rng.choices(self.names, self.weights)[0]
        self.next_document[name] = (self.next_document[name] + 1) % len(self.skills[name])
        return self.skills[name].document(self.next_document[name])

    def step(self, size: int, most_learnt: int) -> Layout:
        """Documents of together at most `size` padded tokens."""
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
