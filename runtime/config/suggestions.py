"""Finds the known name that a user most likely meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

ENOUGH = 0.7  # a name is suggested if its likeness is above this number
# Words of other servers -> Penstock's words for the same thing, so that names with similar meaning count as similar.
_SYNONYMS = {
    "ctx": "context", "seq": "context", "seqs": "requests", "len": "length", "size": "length", "gpu": "device",
    "gpus": "tp", "quant": "quantization", "mem": "memory", "concurrency": "running", "concurrent": "running",
    "parallel": "tp",
    "key": "api", "token": "api", "name": "served", "alias": "served", "adapters": "lora", "adapter": "lora",
}  # fmt: skip


def closest(wanted: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name, or None if no name is similar enough."""
    best = max(known, key=lambda name: (_likeness(wanted, name), -len(name)), default=None)
    return best if best is not None and _likeness(wanted, best) > ENOUGH else None


def _likeness(wanted: str, name: str) -> float:
    """Return the similarity of two names; 1 for equal names.

    A typing error matters less in a long name. Names with the same words are similar in any order of the words.
    """
    whole = 1 - num_edits(wanted, name) / max(len(wanted), len(name), 1)
    beginning = 1 - num_edits(wanted, name[: len(wanted)]) / max(len(wanted), 1)
    return max(whole, 0.95 * beginning, 0.95 * _shared_words(wanted, name))


def _shared_words(wanted: str, name: str) -> float:
    """Return the number of common words divided by the number of all words; 0 if too few words are common."""
    mine, yours = (_words(each) for each in (wanted, name))
    shared = len(mine & yours)
    return shared / len(mine | yours) if shared > 1 or shared == len(mine) == len(yours) else 0


def _words(name: str) -> set[str]:
    return {_SYNONYMS.get(word, word) for word in re.split(r"[-_]", name) if word not in ("", "max", "num")}


def num_edits(one: str, other: str) -> int:
    """Return the edit distance: letters to insert, delete, replace or swap with a neighbour (optimal alignment)."""
    before, row = [], list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, last, row = row, before, [i]
        for j, target in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != target))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == target:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
