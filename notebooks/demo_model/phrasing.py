"""Phrasings of questions, and word lists. The phrasings of the evaluation never occur in training texts.

Every skill has two lists of question patterns. `train` patterns are varied (greetings, missing punctuation, lower
case). `held` patterns are used only by the evaluation, without variation.
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
    """Question patterns with the same meaning. Placeholders are names in braces."""

    train: tuple[str, ...]
    held: tuple[str, ...]

    def pick(self, rng: Random, split: Split, **places: object) -> str:
        """Return one question. Only training questions are varied."""
        if split == "held":
            return rng.choice(self.held).format(**places)
        return decorate(rng, rng.choice(self.train).format(**places))


def decorate(rng: Random, question: str) -> str:
    """Vary the beginning and the end of a question as people do."""
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
    """Return a system prompt in 15 % of the cases, else an empty string."""
    return rng.choice(SYSTEMS) if rng.random() < 0.15 else ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Ada Alan Alba Amir Anna Arne Aya Ben Bela Bo Carl Cleo Cora Dan Dara Dina Edda Ella Emil Enzo Eva Fay "
    "Finn "
    "Flora Gil Gina Greta Hana Hugo Ida Igor Ines Iris Ivan Jana Jack Jon Jude Kai Karl Kira Lana Lars Lea "
    "Leo "
    "Lily Luca Lucy Maja Marc Mary Max Mei Mia Milo Mira Nadia Nils Nina Noah Nora Olaf Olga Omar Oscar Otto "
    "Paul Petra Pia Raj Rita Rosa Ruth Sam Sara Seth Sofia Stella Tara Theo Tim Tom Uma Vera Viktor Wanda "
    "Yara "
    "Yuri Zara Zoe"
)
LAST_NAMES = _words(
    "Abel Adler Baker Bauer Berg Bell Bloom Brandt Brook Carter Cole Dahl Diaz Dunn Falk Field Fischer Ford "
    "Fox "
    "Garcia Gray Green Haas Hill Holm Hunt Ito Jansen Keller Khan Kim Klein Kovac Lang Lind Lopez Maier "
    "Marsh "
    "Meyer Mills Moss Novak Okoye Olsen Park Patel Pearl Reed Rossi Sato Schmidt Silva Singh Stone Suzuki "
    "Tanaka "
    "Vogel Wagner Ward Weber West Winter Wolf Wood Young Zhang"
)
CITIES = _words(
    "Oslo Paris London Berlin Rome Madrid Vienna Prague Lisbon Athens Dublin Helsinki Warsaw Bern Cairo "
    "Tokyo Seoul "
    "Delhi Lima Quito Bogota Boston Chicago Denver Dallas Seattle Toronto Sydney Hamburg Munich Milan "
    "Naples Porto "
    "Geneva Zurich Lyon Nice Bergen Turin Kyoto Osaka Mumbai Nairobi Accra Tunis Doha Hanoi Manila Riga "
    "Tallinn "
    "Krakow Ghent Leeds Bristol Cork Basel Graz"
)
COLOURS = _words("red blue green yellow orange purple pink brown black white grey silver gold turquoise violet")
ANIMALS = _words("cat dog horse rabbit parrot turtle hamster fish goat sheep fox bear owl duck mouse hedgehog frog")
FOODS = _words("pizza soup bread rice pasta salad cheese noodles pancakes apples curry fish dumplings beans potatoes")
ITEMS = _words(
    "apples pears books pens chairs lamps cups plates shirts shoes bottles candles boxes tables bags clocks "
    "pencils towels mirrors hats keys stamps batteries cables"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
JOBS = _words("teacher baker nurse pilot farmer painter doctor driver cook writer singer lawyer gardener plumber")
_STARTS = _words("b d f g h j k l m n p r s t v w z br dr gr kr st tr sh ch")
_VOWELS = _words("a e i o u")
_ENDS = ("", "n", "r", "l", "s", "m", "k", "t", "")


def invented(rng: Random, syllables: int = 2) -> str:
    """Return an invented word, which the model can only copy."""
    word = "".join(rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(syllables)) + rng.choice(_ENDS)
    return word.capitalize()


def first_name(rng: Random) -> str:
    """Return a first name, sometimes an invented one."""
    return invented(rng) if rng.random() < 0.3 else rng.choice(FIRST_NAMES)


def last_name(rng: Random) -> str:
    """Return a family name, sometimes an invented one."""
    return invented(rng) if rng.random() < 0.3 else rng.choice(LAST_NAMES)


def city(rng: Random) -> str:
    """Return a city, sometimes an invented one."""
    return invented(rng) if rng.random() < 0.25 else rng.choice(CITIES)


def number(rng: Random, digits: int = 3) -> int:
    """Return an integer whose number of digits is uniform between 1 and `digits`."""
    length = rng.randint(1, digits)
    return rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)
