"""Ways of asking, split by construction: what evaluation asks is never in the training text.

Every skill writes its question patterns in two lists. `train` patterns are decorated (greetings, missing
punctuation, lower case); `held` patterns are used as they stand and only by evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo_model.conversation import Split

OPENINGS = (
    "Please: ",
    "Hi! ",
    "Hello, ",
    "Quick question: ",
    "Hey, ",
    "Sorry, ",
    "I wonder: ",
    "One more: ",
    "So, ",
    "Question: ",
    "My question is: ",
    "Do you happen to know this? ",
    "I would like to know: ",
    "Answer me: ",
    "Well then. ",
    "For my homework: ",
    "Now something else. ",
    "A friend asks: ",
    "Help me out: ",
    "Okay. ",
)
CLOSINGS = (
    " Thanks.",
    " Thank you!",
    " Please.",
    " I am new to this.",
    " Be brief.",
    " Keep it short.",
    " I forgot.",
    " Just curious.",
    " You surely know.",
    " One sentence is enough.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Penstock's demo model.",
    "Answer in short sentences.",
    "You are a friendly assistant. Be brief.",
    "You help people who use the Penstock server.",
    "Answer truthfully.",
)


@dataclass(frozen=True)
class Patterns:
    """Question patterns of one meaning, with named places in braces."""

    train: tuple[str, ...]
    held: tuple[str, ...]

    def pick(self, rng: Random, split: Split, **places: object) -> str:
        """One question; only training questions are decorated."""
        if split == "held":
            return rng.choice(self.held).format(**places)
        return decorate(rng, rng.choice(self.train).format(**places))


def decorate(rng: Random, question: str) -> str:
    """Vary the edges of a question as people do."""
    chance = rng.random()
    if chance < 0.18:
        question = rng.choice(OPENINGS) + question
    elif chance < 0.25:
        question = question + rng.choice(CLOSINGS)
    elif chance < 0.32:
        question = question.rstrip("?.")
    elif chance < 0.38:
        question = question[:1].lower() + question[1:]
    return question


def maybe_system(rng: Random) -> str:
    """A system prompt, now and then."""
    return rng.choice(SYSTEMS) if rng.random() < 0.15 else ""
