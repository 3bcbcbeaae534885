"""Memory: the user states a fact, talks about something else, and then asks for the fact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from demo_model.conversation import Conversation, Document, Message, Question, Split, says
from demo_model.phrasing import ANIMALS, COLOURS, FOODS, JOBS, Patterns, city, first_name, invented, number
from demo_model.skills import arguments, arithmetic, conversions, penstock, refusal, tables


@dataclass(frozen=True)
class Memory:
    """One fact about the user: sentences that state it, acknowledge it, ask for it and answer."""

    draw: Callable[[Random], str]
    told: Patterns
    noted: str
    asked: Patterns
    answer: str


MORE = {  # more sentences that state a fact, and more that ask for it; only for training
    "name": (
        "Please use my name, {v}.|Let me introduce myself: {v}.|I was given the name {v}.|It "
        "is {v} who writes to you.|Everybody knows me as {v}.|{v} is how my friends call me.|I "
        "am a new user and my name is {v}.|Hello from {v}.|My parents chose the name {v} for "
        "me.|Hi, this is {v}.|You are talking to {v}.",
        "And who am I?|Please say my name once more.|With whom are you talking?|I forgot my "
        "own name, what is it?|Tell me how I am called.|Now what was my name?|Do you still "
        "know who I am?|And how do people call me?|Which name do I have?|What name did I tell "
        "you?|So, my name is?|What did I say my name was?",
    ),
    "colour": (
        "There is no nicer colour than {v}.|The best colour is {v}.|All my clothes are {v}, "
        "since I like that colour.|I always choose {v}.|My walls are {v}, my favourite "
        "colour.|What I like to look at is {v}.|{v} makes me happy, it is a great colour.|I am "
        "fond of the colour {v}.|If I may choose a colour, I take {v}.|{v} is the nicest "
        "colour.|I prefer {v} to all other colours.",
        "And my colour?|What colour is my favourite?|Which colour is the one I prefer?|Tell me "
        "the colour that I like.|Which colour makes me happy?|What is the colour that I always "
        "choose?|Now, what colour did I tell you?|Do you remember which colour I love?|And "
        "which colour do I like most?|So what colour is the best for me?",
    ),
    "number": (
        "I was born with the number {v}.|Write down {v}.|My seat has the number {v}.|Do not "
        "forget the number {v}.|Store {v} for me, please.|The number in my head is {v}.|I love "
        "the number {v}.|My bus has number {v}.|{v} is the number you have to know.|My door "
        "has the number {v}.|I picked the number {v}.|For today my number is {v}.",
        "And my number?|Which number was it?|What is the number I picked?|Say the number once "
        "more.|Now tell me my number.|What number did I give you?|Which number have I "
        "chosen?|So what was my number again?|What is the number of my seat?|Which number did "
        "I want you to keep?|Do you still have my number?|What number is in my head?",
    ),
    "place": (
        "I have a house in {v}.|For years I have been living in {v}.|We moved to {v}.|My "
        "family and I live in {v}.|{v} is my city.|I stay in {v} now.|My flat is in {v}.|{v} "
        "is where I live.|I grew up in {v} and stayed.|I write to you from {v}, where I "
        "live.|Here in {v} we have a small house.|Hello from {v}, my city.",
        "And where do I live?|In which place do I live?|Where is my house?|Tell me my "
        "city.|Which town is mine?|In what city is my flat?|What is the city I live in?|Now, "
        "where am I living?|What city did I tell you about?|So where am I at home?|Where did I "
        "move to?|Do you still know my city?",
    ),
    "pet": (
        "My {v} is very small.|We keep a {v}.|I live together with a {v}.|I got a {v} for my "
        "birthday.|In my garden there is a {v}.|With me lives a {v}.|We bought a {v} last "
        "week.|A {v} sleeps on my bed.|I feed my {v} every day.|My best friend is a {v}.|Every "
        "morning I play with my {v}.",
        "And my pet?|Who sleeps on my bed?|What animal is mine?|Which animal do I keep?|Tell "
        "me what animal I have.|How is my animal called?|What name does my animal have?|What "
        "animal do I feed?|Now what is the name of my animal?|Which pet did I tell you "
        "about?|What is my animal called?|Do you still know my pet?",
    ),
    "food": (
        "I always order {v}.|Nothing is better than {v}.|For dinner I always have {v}.|I enjoy "
        "{v} a lot.|Give me {v} and I am happy.|I eat {v} for lunch.|The best dish is {v}.|My "
        "favourite thing to eat is {v}.|I really like {v}.|We often cook {v}, my favourite.|I "
        "never get enough of {v}.",
        "And my favourite dish, what was it?|What do I always order?|Which dish do I "
        "like?|What do I eat for lunch?|Tell me my favourite food.|What food makes me "
        "happy?|Now what do I love to eat?|Which food did I tell you about?|What do I have for "
        "dinner?|So which dish do I love?|Do you still know what I eat?|Which meal is my "
        "favourite?",
    ),
    "job": (
        "I found work as a {v}.|My profession: {v}.|I am employed as a {v}.|They hired me as a "
        "{v}.|I learned to be a {v}.|As a {v} I work a lot.|I make a living as a {v}.|My work "
        "is that of a {v}.|Since last year I am a {v}.|I like being a {v}.|In my life I am a "
        "{v}.|I was trained as a {v}.",
        "And my job?|Which profession is mine?|How do I earn my money?|What work do I do?|Tell "
        "me what my work is.|How do I make a living?|What is my work?|Now, what am I by "
        "profession?|What did I tell you about my job?|So which job is mine?|What am I trained "
        "as?|Do you still know my job?",
    ),
}


def _memory(kind: str, draw: Callable[[Random], str], told: str, held_told: str, noted: str, asked: str,
held_asked: str, answer: str) -> Memory:  # fmt: skip
    def split(text: str) -> tuple[str, ...]:
        return tuple(text.split("|"))

    return Memory(
        draw,
        Patterns((*split(told), *split(MORE[kind][0])), split(held_told)),
        noted,
        Patterns((*split(asked), *split(MORE[kind][1])), split(held_asked)),
        answer,
    )


MEMORIES: dict[str, Memory] = {
    "name": _memory(
        "name",
        first_name,
        "My name is {v}.|I am {v}.|Hi, I am {v}.|I'm called {v}.|Hello, my name is {v}.|Call me {v}.|{v} is my name.",
        "People call me {v}.|Good day, {v} here.|You can call me {v}.",
        "Nice to meet you, {v}.",
        "Tell me my name again.|I told you my name. Which is it?|Do you recall my name?|Say my name.|What "
        "is my name?|What was my name?|Do you know my name?|Who am I?|How am I called?",
        "Can you still tell me my name?|Which name did I give you?|Do you remember what I am called?",
        "Your name is {v}.",
    ),
    "colour": _memory(
        "colour",
        lambda rng: rng.choice(COLOURS),
        "My favourite colour is {v}.|I like the colour {v}.|{v} is my favourite colour.|I love {v}, it is my colour.",
        "The colour I like best is {v}.|Of all colours I prefer {v}.",
        "I will remember the colour {v}.",
        "Tell me my colour again.|I told you a colour. Which one?|Do you recall the colour I like?|What is "
        "my favourite colour?|Which colour do I like?|What was my colour?|Do you know my favourite "
        "colour?",
        "Can you still tell me my favourite colour?|Which colour did I say I like?",
        "Your favourite colour is {v}.",
    ),
    "number": _memory(
        "number",
        lambda rng: str(number(rng)),
        "My number is {v}.|Remember the number {v}.|My lucky number is {v}.|Keep the number {v} in mind.|"
        "The number is {v}.",
        "Please note the number {v}.|Here is a number for you: {v}.",
        "I will remember the number {v}.",
        "Tell me the number again.|I gave you a number. Which one?|Do you recall the number?|What is my "
        "number?|What was the number?|Which number did I tell you?|Do you know the number?",
        "Can you still tell me the number?|Which number should you remember?",
        "Your number is {v}.",
    ),
    "place": _memory(
        "place",
        city,
        "I live in {v}.|I am from {v}.|My home is in {v}.|I live in the city of {v}.|My city is {v}.|I come from {v}.",
        "The place where I live is {v}.|My home town is {v}.",
        "I will remember that you live in {v}.",
        "Tell me again where I live.|I told you my city. Which one?|Do you recall where I am from?|Where "
        "do I live?|Which city do I live in?|Where am I from?|What is my city?|What was my city?",
        "Can you still tell me where I live?|Which place did I say I live in?",
        "You live in {v}.",
    ),
    "pet": _memory(
        "pet",
        lambda rng: f"{rng.choice(ANIMALS)} called {invented(rng)}",
        "I have a {v}.|My pet is a {v}.|At home I have a {v}.|There is a {v} at my home.",
        "I own a {v}.|My family has a {v}.",
        "That sounds like a nice pet.",
        "Tell me again what pet I have.|I told you about my pet. What is it?|Do you recall my animal?|What "
        "pet do I have?|Which animal do I have?|What is my pet?|What was my pet?",
        "Can you still tell me what pet I have?|Which animal did I say I own?",
        "You have a {v}.",
    ),
    "food": _memory(
        "food",
        lambda rng: rng.choice(FOODS),
        "My favourite food is {v}.|I like to eat {v}.|I love {v}.|I eat {v} every day.",
        "The food I like best is {v}.|What I enjoy most at dinner is {v}.",
        "I will remember that you like {v}.",
        "Tell me again what I like to eat.|I told you my food. Which one?|Do you recall what I like to "
        "eat?|What is my favourite food?|What do I like to eat?|Which food do I like?|What was my "
        "favourite food?",
        "Can you still tell me my favourite food?|Which food did I say I like?",
        "Your favourite food is {v}.",
    ),
    "job": _memory(
        "job",
        lambda rng: rng.choice(JOBS),
        "I work as a {v}.|I am a {v}.|My job is {v}.|I have been a {v} for years.",
        "I earn my money as a {v}.|By profession I am a {v}.",
        "I will remember that you are a {v}.",
        "Tell me again what I work as.|I told you my job. Which one?|Do you recall my job?|What is my job?|"
        "What do I work as?|What was my job?|Which job do I have?",
        "Can you still tell me my job?|Which job did I say I have?",
        "You are a {v}.",
    ),
}
WRITTEN = Path(__file__).parents[1] / "dialogues.json"
ACKNOWLEDGED = "I will remember that."


def between(rng: Random, split: Split) -> tuple[Message, ...]:
    """Return an exchange about another subject, from the same split."""
    skill = rng.choices((tables, arithmetic, arguments, conversions, penstock, refusal), (5, 4, 3, 2, 3, 1))[0]
    while True:
        document = skill.document(rng, split)
        if isinstance(document, Conversation) and len(document.messages) == 2 and document.messages[1].thought is None:
            return document.messages


def _tell(rng: Random, memory: Memory, value: str, split: Split) -> tuple[Message, Message]:
    text = memory.told.pick(rng, split, v=value)
    return Message("user", text[0].upper() + text[1:]), Message("assistant", memory.noted.format(v=value))


def _recall(rng: Random, memory: Memory, value: str, split: Split, thinking: bool = False) -> tuple[Message, Message]:
    thought = "The user told me this before." if thinking else None
    answer = memory.answer.format(v=value)
    return Message("user", memory.asked.pick(rng, split)), Message("assistant", answer, thought)


def document(rng: Random, split: Split) -> Document:
    """Return a dialogue in which the user states one to three facts, and later asks for them."""
    names = rng.sample(tuple(MEMORIES), rng.choice((1, 1, 2, 2, 3)))
    known = [(MEMORIES[name], MEMORIES[name].draw(rng)) for name in names]
    if rng.random() < 0.1:
        return _unknown(rng, split)
    messages: list[Message] = []
    if len(known) > 1 and rng.random() < 0.3:  # state all facts in one message
        told = " ".join(_tell(rng, memory, value, split)[0].content for memory, value in known)
        messages += [Message("user", told), Message("assistant", ACKNOWLEDGED)]
    else:
        for memory, value in known:
            messages += _tell(rng, memory, value, split)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        messages += between(rng, split)
    rng.shuffle(known)
    thinking = rng.random() < 0.15
    for memory, value in known[: rng.choice((1, 2, 3))]:
        messages += _recall(rng, memory, value, split, thinking)
    return Conversation(tuple(messages))


def _unknown(rng: Random, split: Split) -> Conversation:
    """Return a question about a fact that was not stated."""
    memory = rng.choice(tuple(MEMORIES.values()))
    question = Message("user", memory.asked.pick(rng, split))
    return Conversation((*between(rng, split), question, Message("assistant", "You have not told me that.")))


def questions(rng: Random, count: int = 50) -> list[Question]:
    """Return three-turn dialogues. No sentence in them has a phrasing of the training data."""
    asked = []
    for place in range(count):
        name = tuple(MEMORIES)[place % len(MEMORIES)]
        memory = MEMORIES[name]
        value = memory.draw(rng)
        if place % 3 == 2:  # two facts are stated, and the question is about the first one
            other = MEMORIES[rng.choice([known for known in MEMORIES if known != name])]
            middle: tuple[Message, ...] = _tell(rng, other, other.draw(rng), "held")
        else:
            middle = between(rng, "held")
        last = _recall(rng, memory, value, "held")[0]
        messages = (*_tell(rng, memory, value, "held"), *middle, last)
        asked.append(Question(Conversation(messages), says(value), memory.answer.format(v=value)))
    return asked


def written(_: Random) -> list[Question]:
    """Return the dialogues written by hand, each with three user messages. The model answers each message."""
    return [
        Question(
            Conversation(tuple(Message("user", turn) for turn in item["turns"])),
            says(item["expected"]),
            item["expected"],
        )
        for item in json.loads(WRITTEN.read_text())
    ]
