"""Repetition: repeat words, and select words from a list in the context."""

from __future__ import annotations

from random import Random

from demo_model.conversation import Conversation, Document, Message, Prose, Question, Split, ask, says
from demo_model.phrasing import (
    ANIMALS,
    CITIES,
    COLOURS,
    FIRST_NAMES,
    FOODS,
    ITEMS,
    JOBS,
    Patterns,
    invented,
    number,
)

WORDS = (*ANIMALS, *CITIES, *COLOURS, *FIRST_NAMES, *FOODS, *ITEMS, *JOBS)
REPEAT = Patterns(
    (
        "Repeat: {text}",
        "Say: {text}",
        "Repeat after me: {text}",
        "Copy this: {text}",
        "Repeat these words: {text}",
    ),
    ("Echo this: {text}", "Write the same again: {text}"),
)
AFTER = Patterns(
    (
        "Which word comes after {word}? {text}",
        "{text}\nWhich word follows {word}?",
        "What comes after {word} in: {text}",
    ),
    ("In this list, what stands right after {word}? {text}",),
)
FIRST = Patterns(
    ("What is the {place} word? {text}", "{text}\nGive me the {place} word.", "The {place} word of: {text}"),
    ("Tell me the {place} word of this: {text}",),
)


def _word(rng: Random) -> str:
    chance = rng.random()
    return invented(rng, rng.randint(1, 3)) if chance < 0.3 else str(number(rng)) if chance < 0.4 else rng.choice(WORDS)


def _exchange(rng: Random, split: Split) -> tuple[str, str]:
    words = list(dict.fromkeys(_word(rng) for _ in range(rng.randint(2, 9))))
    text = " ".join(words)
    chance = rng.random()
    if chance < 0.6 or len(words) < 2:
        return REPEAT.pick(rng, split, text=text), text
    if chance < 0.85:
        place = rng.randrange(len(words) - 1)
        return AFTER.pick(rng, split, word=words[place], text=text), words[place + 1]
    place = rng.choice(("first", "last"))
    return FIRST.pick(rng, split, place=place, text=text), words[0 if place == "first" else -1]


def _sheet(rng: Random) -> Prose:
    """Return lines that occur twice. Only the second occurrence is learnt."""
    lines = [" ".join(_word(rng) for _ in range(rng.randint(3, 14))) + "\n" for _ in range(rng.randint(1, 3))]
    pieces = [("".join(lines), False), ("".join(lines), True)]
    return Prose("".join(text for text, _ in pieces), tuple(pieces))


def document(rng: Random, split: Split) -> Document:
    """Return a sheet to copy, or one to three lists of words with questions."""
    if rng.random() < 0.6:
        return _sheet(rng)
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        messages.extend(ask(*_exchange(rng, split)).messages)
    return Conversation(tuple(messages))


def questions(rng: Random, count: int) -> list[Question]:
    """Return lists of words with questions in phrasings that are not in the training data."""
    asked = []
    for _ in range(count):
        question, answer = _exchange(rng, "held")
        asked.append(Question(Conversation((Message("user", question),)), says(answer), answer))
    return asked
