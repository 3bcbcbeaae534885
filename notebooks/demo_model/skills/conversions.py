"""Unit conversions: lengths, weights, volumes and times with integer factors."""

from __future__ import annotations

from random import Random

from demo_model.conversation import Conversation, Document, Message, Question, Split, ask, says
from demo_model.phrasing import Patterns, maybe_system

# (large unit, small unit, factor, largest number of large units)
UNITS: tuple[tuple[str, str, int, int], ...] = (
    ("kilometres", "metres", 1000, 99),
    ("metres", "centimetres", 100, 99),
    ("centimetres", "millimetres", 10, 99),
    ("kilograms", "grams", 1000, 99),
    ("tonnes", "kilograms", 1000, 99),
    ("grams", "milligrams", 1000, 99),
    ("litres", "millilitres", 1000, 99),
    ("seconds", "milliseconds", 1000, 99),
    ("minutes", "seconds", 60, 20),
    ("hours", "minutes", 60, 20),
    ("days", "hours", 24, 12),
    ("weeks", "days", 7, 20),
    ("years", "months", 12, 12),
    ("feet", "inches", 12, 12),
    ("yards", "feet", 3, 30),
    ("kilobytes", "bytes", 1000, 99),
    ("euros", "cents", 100, 99),
)
ASKED = Patterns(
    (
        "How many {small} are {n} {large}?", "Convert {n} {large} to {small}.", "{n} {large} in {small}",
        "What is {n} {large} in {small}?", "{n} {large} to {small}", "How many {small} are in {n} {large}?",
        "Turn {n} {large} into {small}.", "Give me {n} {large} in {small}.",
    ),
    ("Express {n} {large} in {small}.", "{n} {large} is how many {small}?", "Please change {n} {large} to "
    "{small}."),
)  # fmt: skip


def _pick(rng: Random) -> tuple[int, str, int, str]:
    large, small, factor, most = rng.choice(UNITS)
    n = rng.randint(2, most)
    if rng.random() < 0.3:  # convert from small to large units
        return n * factor, small, n, large
    return n, large, n * factor, small


def document(rng: Random, split: Split) -> Document:
    """Return a document with one conversion."""
    n, large, value, small = _pick(rng)
    thought = f"{n} {large} in {small}: {value}" if rng.random() < 0.25 else None
    question = ASKED.pick(rng, split, n=n, large=large, small=small)
    return ask(question, f"{n} {large} are {value} {small}.", thought, maybe_system(rng))


def questions(rng: Random, count: int) -> list[Question]:
    """Return conversions in phrasings that are not in the training data."""
    asked = []
    for _ in range(count):
        n, large, value, small = _pick(rng)
        question = Message("user", ASKED.pick(rng, "held", n=n, large=large, small=small))
        asked.append(Question(Conversation((question,)), says(f" {value} {small}"), f"{value} {small}"))
    return asked
