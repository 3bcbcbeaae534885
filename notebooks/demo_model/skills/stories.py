"""Generated short stories, from which the model learns to continue plain English."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from demo_model.conversation import Document, Prose, Split, ask
from demo_model.phrasing import ANIMALS, COLOURS, FIRST_NAMES, FOODS, Patterns

PLACES = (
    "forest",
    "village",
    "garden",
    "town",
    "valley",
    "house by the sea",
    "farm",
    "castle",
    "small island",
)
MOODS = ("happy", "curious", "brave", "quiet", "tired", "hungry", "clever", "kind", "lonely", "proud")
THINGS = ("key", "lamp", "map", "ring", "box", "letter", "coin", "book", "boat", "kite", "bell", "stone")
SPOTS = (
    "under a tree",
    "behind a door",
    "near the river",
    "on the hill",
    "in the snow",
    "beside the road",
    "at the well",
)
WEATHER = (
    "The sun was shining.",
    "It rained all night.",
    "The wind was cold.",
    "Snow lay on the roofs.",
    "It was warm.",
)
TALES = Patterns(
    ("Tell me a story about a {animal}.", "Write a story about a {animal}.", "A short story about a "
    "{animal}, please.",
     "Tell a little story with a {animal}."),
    ("I would like to hear a story about a {animal}.",),
)  # fmt: skip
ONWARD = Patterns(
    (
        "Continue this story: {start}",
        "Go on: {start}",
        "Continue: {start}",
        "How does this story go on? {start}",
    ),
    ("Please finish this story: {start}",),
)


@dataclass(frozen=True)
class Cast:
    """The characters, places and objects of a story."""

    hero: str
    animal: str
    friend: str
    thing: str
    colour: str
    place: str
    mood: str
    food: str


def _cast(rng: Random) -> Cast:
    hero, friend = rng.sample(FIRST_NAMES, 2)
    return Cast(
        hero, rng.choice(ANIMALS), friend, rng.choice(THINGS), rng.choice(COLOURS), rng.choice(PLACES),
        rng.choice(MOODS), rng.choice(FOODS),
    )  # fmt: skip


def story(rng: Random, cast: Cast) -> list[str]:
    """Return six to nine sentences: a beginning, a find, a meeting, and an end."""
    c = cast
    begin = rng.choice((
        f"Once upon a time there was a {c.mood} {c.animal} called {c.hero}.",
        f"There was once a {c.animal} whose name was {c.hero}.",
        f"{c.hero} was a {c.mood} {c.animal}.",
        f"Long ago, a {c.mood} {c.animal} called {c.hero} lived in a {c.place}.",
    ))  # fmt: skip
    home = rng.choice((f"{c.hero} lived in a {c.place}.", f"The {c.place} was home to {c.hero} and many others."))
    find = rng.choice((
        f"One day {c.hero} found a {c.colour} {c.thing} {rng.choice(SPOTS)}.",
        f"One morning {c.hero} saw a {c.colour} {c.thing} {rng.choice(SPOTS)}.",
    ))  # fmt: skip
    think = rng.choice((
        f'"Whose {c.thing} is this?" asked {c.hero}.', f'"What a beautiful {c.thing}!" said {c.hero}.',
        f"{c.hero} had never seen such a {c.thing}.",
    ))  # fmt: skip
    meet = rng.choice((
        f"Then {c.friend} came along and looked for the {c.thing}.",
        f"In the evening {c.hero} met {c.friend}, who had lost a {c.colour} {c.thing}.",
        f"{c.friend} came by and began to cry, because the {c.thing} was lost.",
    ))  # fmt: skip
    give = rng.choice((
        f"{c.hero} gave the {c.thing} back at once.", f"{c.hero} smiled and gave {c.friend} the {c.thing}.",
        f'"Here it is," said {c.hero}, and {c.friend} was very glad.',
    ))  # fmt: skip
    end = rng.choice((
        f"They shared {c.food} and became good friends.", f"That night they ate {c.food} together and "
        f"laughed.",
        f"From that day on, {c.hero} and {c.friend} were friends.",
    ))  # fmt: skip
    parts = [
        begin,
        *([home] if c.place not in begin else []),
        rng.choice(WEATHER),
        find,
        think,
        meet,
        give,
        end,
    ]
    parts = [_grammatical(part) for part in parts if part != think or rng.random() < 0.7]
    return parts


def _grammatical(text: str) -> str:
    """Return the text with "a" changed to "an" before vowels."""
    return re.sub(r"\b([aA]) (?=[aeiou])", r"\1n ", text)


def document(rng: Random, split: Split) -> Document:
    """Return a plain story, a story on request, or the rest of a story."""
    cast = _cast(rng)
    sentences = story(rng, cast)
    chance = rng.random()
    if chance < 0.5:
        return Prose(" ".join(sentences))
    if chance < 0.75:
        thought = f"A story about a {cast.animal}." if rng.random() < 0.2 else None
        question = _grammatical(TALES.pick(rng, split, animal=cast.animal))
        return ask(question, " ".join(sentences), thought)
    cut = rng.randint(1, 3)
    question = ONWARD.pick(rng, split, start=" ".join(sentences[:cut]))
    return ask(question, " ".join(sentences[cut:]), "The story goes on." if rng.random() < 0.2 else None)
