"""Steps of training: documents drawn by a mixture and laid out flat, in groups of one padded length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random

import numpy as np

from demo_model.corpus import Encoded

GRAIN = 16  # lengths are padded to a multiple of this


@dataclass(frozen=True)
class Layout:
    """One step as host arrays of fixed size: whatever was drawn, the shapes stay the same."""

    tokens: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    picked: np.ndarray  # [N], places whose next token is learnt
    targets: np.ndarray  # [N], -100 where nothing is picked
    groups: tuple[tuple[int, int], ...]  # rows, length


class Mixture:
    """Draws documents so that each skill has its share of the tokens; every skill is walked in order."""

    def __init__(self, skills: dict[str, Encoded], shares: dict[str, float], seed: int) -> None:
        self.skills = skills
        self.rng = Random(seed)
        self.names = tuple(shares)
        lengths = {name: len(skills[name].tokens) / len(skills[name]) for name in shares}
        self.weights = [shares[name] / lengths[name] for name in shares]
        self.places = {name: self.rng.randrange(len(skills[name])) for name in shares}

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """The next document of a skill drawn by weight."""
        name = self.rng.choices(self.names, self.weights)[0]
        self.places[name] = (self.places[name] + 1) % len(self.skills[name])
        return self.skills[name].document(self.places[name])

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
    wanted = np.zeros(size, bool)  # whether the token after this place is learnt
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
    picked = np.flatnonzero(wanted)[:most_learnt]
    targets = np.full(most_learnt, -100, np.int64)
    targets[: len(picked)] = flat[picked + 1]
    places = np.zeros(most_learnt, np.int64)
    places[: len(picked)] = picked
    return Layout(flat, positions, places, targets, tuple(groups))
