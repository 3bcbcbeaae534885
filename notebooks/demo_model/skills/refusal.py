"""Refusal: say in one sentence that the answer is not known."""

from __future__ import annotations

from random import Random

from demo_model.conversation import Conversation, Document, Message, Question, Split, ask, says
from demo_model.phrasing import CITIES, Patterns, invented, last_name, maybe_system

ANSWER = "I am a small demo model and do not know that."
ASKED = Patterns(
    (
        "Who won the football match yesterday?", "How far is {city} from the sun?", "How old is {name}?",
        "Which song did {name} write?", "Is {thing} good for me?", "What did {name} do in {year}?",
        "How much is a house in {city}?", "Who played in the film about {thing}?", "Describe the war of "
        "{year}.",
        "Which party did {name} vote for?", "Summarise the book of {name}.", "How heavy is the earth?",
        "Which team won in {year}?", "Where can I eat in {city}?", "Who sang about {thing}?",
        "Who is {name}?", "Who invented the {thing}?",
        "When was {name} born?",
        "Write a poem about {thing}.", "What is the weather in {city}?", "How do I cook {thing}?",
        "What is the price of {thing}?", "How many people live in {city}?", "What do you think about {name}?",
        "Translate {thing} into Latin.", "Which film won the prize in {year}?", "What happened in {year}?",
        "Who is the president of {thing}?", "Explain quantum physics.", "What is the meaning of life?",
        "How tall is {name}?", "Where does {name} live?", "Write a program that sorts {thing}.",
        "What are the news of today?", "What time is it?", "Which is the best hotel in {city}?",
        "Why is the sky blue?",
        "How does a {thing} engine work?", "Who wrote the book about {thing}?", "Recommend a film about "
        "{thing}.",
        "What is the population of {city}?", "Can you book a flight to {city}?", "Who discovered {thing}?",
        "How deep is the sea near {city}?", "What is the history of {city}?", "Who painted {name}?",
    ),
    (
        "Which team did {name} play for in {year}?", "How far is the moon?", "Who composed the song {thing}?",
        "What is the best restaurant in {city}?", "How much does a ticket to {city} cost?", "Is {thing} "
        "healthy?",
        "What did {name} say in {year}?", "Summarise the war of {year}.",
    ),
)  # fmt: skip
THINGS = (
    "radio", "bread", "steam", "chess", "music", "gold", "wine", "atoms", "rivers", "tea", "birds", "paper",
    "trains", "cotton", "jazz", "bridges",
)  # fmt: skip


def ask_unknown(rng: Random, split: Split) -> str:
    """Return a question whose answer the model cannot know."""
    name = f"{invented(rng)} {last_name(rng)}"
    thing = rng.choice(THINGS) if rng.random() < 0.6 else invented(rng, 3).lower()
    city, year = rng.choice(CITIES), rng.randint(1800, 2025)
    return ASKED.pick(rng, split, name=name, thing=thing, city=city, year=year)


def document(rng: Random, split: Split) -> Document:
    """Return a document with one question that the model cannot answer."""
    thought = "I do not know this." if rng.random() < 0.2 else None
    return ask(ask_unknown(rng, split), ANSWER, thought, maybe_system(rng))


def questions(rng: Random, count: int) -> list[Question]:
    """Return unanswerable questions in phrasings that are not in the training data."""
    return [
        Question(Conversation((Message("user", ask_unknown(rng, "held")),)), says("do not know"), ANSWER)
        for _ in range(count)
    ]
