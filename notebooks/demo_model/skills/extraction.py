"""Extraction: convert a short sentence to a JSON object with the fields that the question names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_model.conversation import Conversation, Document, Message, Question, Split, ask
from demo_model.phrasing import (
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    ITEMS,
    JOBS,
    MONTHS,
    Patterns,
    city,
    first_name,
    invented,
    last_name,
    maybe_system,
    number,
)  # fmt: skip
from demo_model.skills.sentences import FORMS

Values = dict[str, Any]
ASKED = Patterns(
    (
        "Extract {fields} as JSON: {text}", "Extract {fields} as a JSON object.\n{text}",
        "JSON with {fields}: {text}",
        "Turn this into JSON with {fields}: {text}", "{text}\nGive me {fields} as JSON.",
        "{text} Extract {fields} as JSON.", "Return a JSON object with {fields}. Text: {text}",
        "Make JSON from this sentence, fields {fields}: {text}", "Fill a JSON object ({fields}) from: {text}",
        "Read the text and write {fields} as JSON. {text}", "From the sentence, get {fields} in JSON: {text}",
    ),
    (
        "Convert the following sentence to a JSON object with the fields {fields}: {text}",
        "Please pull {fields} out of this text as JSON: {text}",
        "{text}\nWrite a JSON object with {fields}.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A kind of sentence: a function that draws its values, and its phrasings."""

    draw: Callable[[Random], Values]
    said: Patterns


def _person(rng: Random) -> Values:
    return {"name": f"{first_name(rng)} {last_name(rng)}", "age": rng.randint(5, 95), "city": city(rng)}


def _worker(rng: Random) -> Values:
    return {"name": first_name(rng), "job": rng.choice(JOBS), "city": city(rng)}


def _order(rng: Random) -> Values:
    return {"quantity": rng.randint(2, 99), "item": rng.choice(ITEMS), "price": number(rng)}


def _meeting(rng: Random) -> Values:
    return {"person": first_name(rng), "day": rng.choice(DAYS), "hour": rng.randint(7, 20)}


def _pet(rng: Random) -> Values:
    animal, colour = rng.choice(ANIMALS), rng.choice(COLOURS)
    return {"owner": first_name(rng), "animal": animal, "name": invented(rng), "colour": colour}


def _flight(rng: Random) -> Values:
    return {"from": city(rng), "to": city(rng), "day": rng.choice(DAYS)}


def _book(rng: Random) -> Values:
    title = f"The {rng.choice(COLOURS).capitalize()} {rng.choice(ANIMALS).capitalize()}"
    return {"title": title, "author": f"{first_name(rng)} {last_name(rng)}", "year": rng.randint(1900, 2025)}


def _product(rng: Random) -> Values:
    return {"product": rng.choice(ITEMS), "colour": rng.choice(COLOURS), "price": number(rng)}


def _birthday(rng: Random) -> Values:
    return {"name": first_name(rng), "month": rng.choice(MONTHS), "day": rng.randint(1, 28)}


def _meal(rng: Random) -> Values:
    return {"name": first_name(rng), "food": rng.choice(FOODS), "table": rng.randint(1, 40)}


def _said(kind: str, train: str, held: str) -> Patterns:
    more = FORMS[kind].strip().splitlines()
    return Patterns((*train.split("|"), *more), tuple(held.split("|")))


FRAMES = (
    "I heard this: {}", "Note: {}", "By the way: {}", "Good morning. {}", "{} That is all.",
    "{} I wrote it down.", "{} Great!", "It rained today. {}", "{} We are glad.", "News: {}",
    "{} Good, is it not?", "Listen. {}",
)  # fmt: skip


RECORDS: tuple[Record, ...] = (
    Record(_person, _said("person",
        "This is {name}, {age} years old, who lives in {city}.|{city} is the home of {name}, who is {age}.|"
        "{name} is {age} years old and lives in {city}.|{name}, {age}, lives in {city}.|{name} from {city} "
        "is {age}.|"
        "I am {name}, {age} years old, from {city}.|In {city} lives {name}, aged {age}.",
        "{name} lives in {city} and is {age} years old.|My name is {name}, I am {age} and I live in "
        "{city}.")),
    Record(_worker, _said("worker",
        "Ask {name}, the {job} in {city}.|I know {name}, a {job} in {city}.|{name} works as a {job} in "
        "{city}.|{name} is a {job} from {city}.|In {city}, {name} works as a "
        "{job}.|"
        "The {job} {name} lives in {city}.",
        "{name} lives in {city} and is a {job}.|A {job} called {name} works in {city}.")),
    Record(_order, _said("order",
        "We need {quantity} {item}, we pay {price} euros.|{price} euros is the price for {quantity} "
        "{item}.|I would like to order {quantity} {item} for {price} euros.|{quantity} {item} cost {price} "
        "euros.|"
        "She bought {quantity} {item} and paid {price} euros.|Order: {quantity} {item}, {price} euros.",
        "Please send {quantity} {item}, the price is {price} euros.|He paid {price} euros for {quantity} "
        "{item}.")),
    Record(_meeting, _said("meeting",
        "At {hour} on {day} {person} has time.|Talk to {person} on {day}, {hour} o'clock.|Meet {person} on "
        "{day} at {hour} o'clock.|{person} comes on {day} at {hour}.|On {day} at {hour} I "
        "meet {person}."
        "|The meeting with {person} is on {day} at {hour}.",
        "I have a meeting with {person} on {day} at {hour} o'clock.|{person} wants to talk at {hour} on "
        "{day}.")),
    Record(_pet, _said("pet",
        "{owner} bought a {animal}, it is {colour} and called {name}.|The {animal} {name} is {colour} and "
        "lives at the house of {owner}.|{owner} has a {colour} {animal} called {name}.|The {colour} "
        "{animal} {name} belongs to {owner}.|"
        "{name} is the {colour} {animal} of {owner}.",
        "{owner} owns a {colour} {animal} named {name}.|{name}, a {colour} {animal}, lives with {owner}.")),
    Record(_flight, _said("flight",
        "I want to go to {to} from {from} on {day}.|{day}: {from} to {to}.|A flight from {from} to {to} on "
        "{day}.|On {day} we fly from {from} to {to}.|The train from {from} "
        "to {to} "
        "leaves on {day}.|I travel to {to} on {day}, from {from}.",
        "Book a ticket from {from} to {to} for {day}.|She goes from {from} to {to} on {day}.")),
    Record(_book, _said("book",
        "{author} is the author of {title}, {year}.|Read {title} ({author}, {year}).|{title} was written "
        "by {author} in {year}.|In {year}, {author} wrote {title}.|{author} published "
        "{title} in "
        "{year}.|The book {title} by {author} is from {year}.",
        "{title} is a book by {author} from {year}.|The author of {title} ({year}) is {author}.")),
    Record(_product, _said("product",
        "{colour} {product}, {price} euros.|You pay {price} euros for the {colour} {product}.|The {colour} "
        "{product} cost {price} euros.|We sell {colour} {product} for {price} euros.|"
        "For {price} euros you get {colour} {product}.",
        "The price of the {colour} {product} is {price} euros.|{price} euros for {colour} {product}.")),
    Record(_birthday, _said("birthday",
        "{month} {day} is the day when {name} was born.|We celebrate {name} on {month} {day}.|{name} was "
        "born on {month} {day}.|The birthday of {name} is {month} {day}.|On {month} {day} is "
        "{name}'s birthday.",
        "{name} has a birthday on {month} {day}.|{name}'s birthday: {month} {day}.")),
    Record(_meal, _said("meal",
        "Take the {food} to table {table}, it is for {name}.|{food} for table {table}, the guest is "
        "{name}.|{name} at table {table} wants {food}.|Table {table}: {food} for {name}.|{name} ordered "
        "{food} at "
        "table {table}.",
        "Bring {food} to {name} at table {table}.|At table {table}, {name} eats {food}.")),
)  # fmt: skip


def _listed(fields: list[str]) -> str:
    return fields[0] if len(fields) == 1 else ", ".join(fields[:-1]) + " and " + fields[-1]


def exchange(rng: Random, split: Split) -> tuple[str, Values]:
    """Return a question and the JSON object that answers it. The order of the fields varies, and some are left out."""
    record = rng.choice(RECORDS)
    values = record.draw(rng)
    fields = list(values)
    if rng.random() < 0.5:
        rng.shuffle(fields)
    if rng.random() < 0.25:
        fields = fields[:2]
    text = rng.choice(record.said.held if split == "held" else record.said.train).format(**values)
    text = text[0].upper() + text[1:]
    if split == "train" and rng.random() < 0.1:
        text = rng.choice(FRAMES).format(text)
    question = ASKED.pick(rng, split, fields=_listed(fields), text=text)
    return question, {name: values[name] for name in fields}


def document(rng: Random, split: Split) -> Document:
    """Return a document that converts one or two sentences to objects."""
    messages: list[Message] = []
    thinking = rng.random() < 0.15
    for _ in range(2 if rng.random() < 0.3 else 1):
        question, values = exchange(rng, split)
        thought = f"The fields are {_listed(list(values))}." if thinking else None
        answer = json.dumps(values, ensure_ascii=False)
        messages.extend(ask(question, answer, thought, "" if messages else maybe_system(rng)).messages)
    return Conversation(tuple(messages))


def equals(values: Values) -> Callable[[str], bool]:
    """Return a check that is true if the answer is exactly this object."""

    def check(answer: str) -> bool:
        try:
            return json.loads(answer) == values
        except json.JSONDecodeError:
            return False

    return check


def questions(rng: Random, count: int) -> list[Question]:
    """Return sentences and requests in phrasings that are not in the training data."""
    asked = []
    for _ in range(count):
        text, values = exchange(rng, "held")
        asked.append(Question(Conversation((Message("user", text),)), equals(values), json.dumps(values)))
    return asked
