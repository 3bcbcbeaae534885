"""The skill of explaining server arguments, with facts taken from the option declarations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from demo_model.conversation import Conversation, Document, Message, Prose, Question, Split, ask
from demo_model.phrasing import Patterns, invented, maybe_system
from runtime.config import Option, options, shown

ASKED = Patterns(
    (
        "What does {o} do?", "What is {o}?", "Explain {o}.", "What is {o} for?", "{o}", "{o}?",
        "Tell me about {o}.",
        "What does the argument {o} do?", "What does the option {o} mean?", "Describe {o}.", "What does {o} "
        "mean?",
        "How does {o} work?", "What happens when I set {o}?", "What effect does {o} have?", "Meaning of {o}?",
        "Explain the flag {o}.", "What does the server argument {o} control?", "Help for {o}", "Define {o}.",
        "I do not understand {o}.", "What can I do with {o}?", "Why is there an argument {o}?",
        "What does {o} change?", "Which effect has the setting {o}?", "Explain the server option {o} to me.",
    ),
    (
        "Can you explain what {o} is good for?", "Give me a short description of {o}.",
        "I saw {o} in a start script. What is its purpose?", "When would I need {o}?",
        "Could you tell me the purpose of {o}?", "In Penstock, what does setting {o} achieve?",
        "How would you describe the {o} parameter?", "What is the role of {o} in the server?",
    ),
)  # fmt: skip
AROUND = (
    "a about and any are as be but by can could do does explain flag for from get give good have help here "
    "how I if "
    "in is it its just know like look make may me mean my need new now of on one or our please really run "
    "see server "
    "should show so start tell that the then there this to understand use used was we what when where "
    "which why will "
    "with would you your"
)
DEFAULT = Patterns(
    (
        "What is the default of {o}?",
        "Default of {o}?",
        "Which default does {o} have?",
        "What is {o} if I do not set it?",
    ),
    ("Tell me the default value of {o}.", "Which value does {o} have by default?"),
)
CHOICES = Patterns(
    (
        "Which values does {o} take?",
        "What can I set {o} to?",
        "Choices of {o}?",
        "What are the choices of {o}?",
    ),
    ("Tell me the allowed values of {o}.", "Which settings are possible for {o}?"),
)
REVERSE = Patterns(
    ("Which argument is this: {fact}", "Name the option: {fact}", "Which flag does this? {fact}"),
    ("Which argument fits this description? {fact}",),
)


@dataclass(frozen=True)
class Fact:
    """One argument, and the sentence that explains it."""

    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag

    @property
    def sentence(self) -> str:
        """The first sentence of the option's help text."""
        return re.split(r"(?<=[.])\s+(?=[A-Z\-\d])", self.option.spec.help.strip())[0]

    @property
    def answer(self) -> str:
        return f"{self.flag}: {self.sentence}"

    @property
    def has_plain_default(self) -> bool:
        default = self.option.default
        return isinstance(default, (int, float, str)) and default != "" and len(str(default)) < 20


@cache
def facts() -> tuple[Fact, ...]:
    """Return one fact per declared argument."""
    return tuple(Fact(option) for option in options())


def spelling(rng: Random, fact: Fact) -> str:
    """Return the argument as people write it: usually the flag, sometimes without dashes."""
    flag = fact.flag if rng.random() < 0.85 else rng.choice(fact.option.flags)
    bare = flag.removeprefix("--")
    chance = rng.random()
    if chance < 0.72:
        return flag
    if chance < 0.80:
        return f"`{flag}`"
    if chance < 0.87:
        return bare
    return bare.replace("-", "_") if chance < 0.94 else bare.replace("-", " ")


def _asked(rng: Random, split: Split, o: str) -> str:
    """Return a question about an argument.

    In training, it is sometimes the name among random words, so that the model learns to look at the name alone.
    """
    if split == "held" or rng.random() < 0.8:
        return ASKED.pick(rng, split, o=o)
    words = [rng.choice(AROUND.split()) for _ in range(rng.randint(2, 9))]
    words.insert(rng.randint(0, len(words)), o)
    return " ".join(words) + rng.choice(("?", ".", ""))


def _shown_default(fact: Fact) -> str:
    default = fact.option.default
    return "off" if default is False else "on" if default is True else shown(fact.option, default)


def _exchange(rng: Random, split: Split) -> tuple[str, str]:
    fact = rng.choice(facts())
    o = spelling(rng, fact)
    chance = rng.random()
    if chance < 0.10 and fact.has_plain_default:
        return DEFAULT.pick(rng, split, o=o), f"The default of {fact.flag} is {_shown_default(fact)}."
    if chance < 0.18 and fact.option.spec.choices:
        listed = ", ".join(str(choice) for choice in fact.option.spec.choices)
        return CHOICES.pick(rng, split, o=o), f"{fact.flag} takes {listed}."
    if chance < 0.22:
        return REVERSE.pick(rng, split, fact=fact.sentence), f"{fact.flag}"
    if chance < 0.24:
        flag = "--" + "-".join(invented(rng).lower() for _ in range(rng.randint(1, 3)))
        return _asked(rng, split, flag), f"I do not know an argument called {flag}."
    return _asked(rng, split, o), fact.answer


def document(rng: Random, split: Split) -> Document:
    """Return one question about an argument, two questions in a row, or a list of explained arguments."""
    chance = rng.random()
    if chance < 0.06:
        return Prose("\n".join(fact.answer for fact in rng.sample(facts(), 6)) + "\n")
    question, answer = _exchange(rng, split)
    named = next((word for word in answer.split() if word.startswith("--")), "it").rstrip(":.")
    thought = f"The question is about {named}." if rng.random() < 0.15 else None
    first = ask(question, answer, thought, maybe_system(rng))
    if chance < 0.35:
        again = ask(*_exchange(rng, split), thought=None if thought is None else "Another argument.")
        return Conversation((*first.messages, *again.messages))
    return first


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"[a-z0-9]+", text.lower()))


def similarity(answer: str, reference: str) -> float:
    """Return the F1 score of the words that answer and reference have in common."""
    got, wanted = _words(answer), _words(reference)
    common = sum((got & wanted).values())
    return 2 * common / max(1, got.total() + wanted.total())


def states(fact: Fact) -> Callable[[str], bool]:
    """Return a check that is true if the answer has this argument's sentence and not another argument's.

    The flag itself does not count. Only the words after it are compared with the sentences of all arguments.
    """

    def check(answer: str) -> bool:
        said = answer.split(":", 1)[-1] if answer.lstrip("` ").startswith("--") else answer
        best = max(similarity(said, other.sentence) for other in facts())
        own = similarity(said, fact.sentence)
        return own >= 0.7 and own >= best

    return check


def questions(rng: Random, per_fact: int = 1) -> list[Question]:
    """Return one question per argument, in phrasings that are not in the training data."""
    asked = []
    for fact in facts():
        for _ in range(per_fact):
            text = ASKED.pick(rng, "held", o=fact.flag)
            asked.append(Question(Conversation((Message("user", text),)), states(fact), fact.answer))
    return asked
