"""Tool calls: call one of the offered tools with the correct arguments, and report the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_model.conversation import Conversation, Document, Message, Question, Split, call_text
from demo_model.phrasing import (
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    ITEMS,
    Patterns,
    city,
    decorate,
    first_name,
    invented,
    number,
)
from demo_model.skills import penstock, refusal

Values = dict[str, Any]
SYSTEMS = (
    "You are a helpful assistant.",
    "Use the tools when they help.",
    "Answer with tools where you can.",
)


@dataclass(frozen=True)
class Tool:
    """One tool: its schema, the questions that need it, its result, and the phrasing of the result."""

    name: str
    does: str
    fields: dict[str, str]  # field -> JSON type
    draw: Callable[[Random], Values]
    asked: Patterns
    returns: Callable[[Random, Values], Values]
    told: str

    def schema(self) -> dict[str, Any]:
        """Return the function part of an OpenAI tool."""
        properties = {name: {"type": kind} for name, kind in self.fields.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.fields)}
        return {"name": self.name, "description": self.does, "parameters": parameters}


def _tool(
    name: str, does: str, fields: str, draw: Callable[[Random], Values], train: str, held: str,
    returns: Callable[[Random, Values], Values], told: str,
) -> Tool:  # fmt: skip
    typed = {}
    for part in fields.split():
        field, _, kind = part.partition(":")
        typed[field] = kind or "string"
    return Tool(name, does, typed, draw, Patterns(tuple(train.split("|")), tuple(held.split("|"))), returns, told)


def _song(rng: Random) -> str:
    return f"{invented(rng)} {rng.choice(('Moon', 'River', 'Dance', 'Dream', 'Rain'))}"


TOOLS: tuple[Tool, ...] = (
    _tool("get_weather", "Get the weather of a city.", "city", lambda r: {"city": city(r)},
          "Will I need a coat in {city}?|Weather report for {city}, please.|I travel to {city}, how is the "
          "weather?|What is the weather in {city}?|How is the weather in {city}?|Weather in {city}|Is it "
          "cold in "
          "{city}?|"
          "Check the weather in {city}.",
          "What weather do they have in {city}?|Tell me the weather for {city}.",
          lambda r, v: {"temperature": r.randint(-9, 38), "sky": r.choice(("sunny", "cloudy", "rainy",
          "snowy"))},
          "In {city} it is {temperature} degrees and {sky}."),
    _tool("get_time", "Get the time in a city.", "city", lambda r: {"city": city(r)},
          "What does the clock say in {city}?|I need the time in {city}.|What is the time now in {city}?|"
          "What time is it in {city}?|Time in {city}?|How late is it in {city}?|Get the time in {city}.",
          "Tell me the local time in {city}.|Which time do they have in {city}?",
          lambda r, v: {"time": f"{r.randint(0, 23):02}:{r.randint(0, 59):02}"}, "In {city} it is {time}."),
    _tool("add_event", "Add an event to the calendar.", "title day", lambda r: {
              "title": r.choice(("lunch", "meeting", "dentist", "party", "training",
              "concert")), "day": r.choice(DAYS)},
          "On {day} there is {title}, add it to the calendar.|Save {title} for {day}.|Calendar: {title} on "
          "{day}.|Add {title} on {day} to my calendar.|Put {title} on {day} into the calendar.|Plan "
          "{title} for "
          "{day}.|"
          "New event: {title}, {day}.",
          "I have {title} on {day}, please note it in the calendar.|Enter {title} for {day} in my calendar.",
          lambda r, v: {"ok": True}, "{title} is in the calendar for {day}."),
    _tool("send_message", "Send a message to a person.", "to text", lambda r: {
              "to": first_name(r), "text": r.choice(("hello", "I am late", "call me", "see you soon",
              "thank you",
                                                     "dinner is ready", "good luck", "I am home"))},
          "I want to tell {to}: {text}|Text {to}: {text}|Send this to {to}: {text}|A message for {to}: "
          "{text}|Send {to} the message: {text}|Tell {to}: {text}|Write to {to}: {text}|Message {to}: {text}",
          "Please let {to} know: {text}|Send a message to {to} with the text: {text}",
          lambda r, v: {"sent": True}, "The message to {to} is sent."),
    _tool("set_timer", "Start a timer.", "minutes:integer", lambda r: {"minutes": r.randint(1, 120)},
          "Remind me after {minutes} minutes.|{minutes} minutes on the timer, please.|Ring in {minutes} "
          "minutes.|Let me know when {minutes} minutes are over.|Set a timer for {minutes} minutes.|Timer "
          "{minutes} minutes|Start a timer of {minutes} minutes.|"
          "Wake me in {minutes} minutes.",
          "I need a timer that runs {minutes} minutes.|Count down {minutes} minutes.",
          lambda r, v: {"running": True}, "The timer runs for {minutes} minutes."),
    _tool("play_song", "Play a song.", "title", lambda r: {"title": _song(r)},
          "Let me hear {title}.|I would like the song {title}.|Music: {title}|Play {title}.|Play the song "
          "{title}.|I want to hear {title}.|Start {title}.",
          "Can you play {title} for me?|Put on the song {title}.",
          lambda r, v: {"playing": True}, "Now playing {title}."),
    _tool("convert_currency", "Convert money.", "amount:integer from to", lambda r: dict(
              zip(("from", "to"), r.sample(("EUR", "USD", "GBP", "JPY", "CHF"), 2)), amount=number(r)),
          "Exchange {amount} {from} for {to}.|I have {amount} {from}. How many {to} is that?|Turn {amount} "
          "{from} into {to}.|Convert {amount} {from} to {to}.|How much is {amount} {from} in {to}?|"
          "{amount} {from} in {to}",
          "Change {amount} {from} into {to}.|What are {amount} {from} worth in {to}?",
          lambda r, v: {"result": number(r)}, "{amount} {from} are {result} {to}."),
    _tool("search_products", "Search the shop.", "query max_price:integer", lambda r: {
              "query": f"{r.choice(COLOURS)} {r.choice(ITEMS)}", "max_price": r.randint(5, 200)},
          "I look for {query}, not above {max_price} euros.|Show {query} for less than {max_price} euros.|"
          "Do you sell {query} for {max_price} euros or less?|Find {query} below {max_price} euros.|Search "
          "{query} under {max_price} euros.|"
          "I want {query} for at most {max_price} euros.",
          "Are there {query} that cost less than {max_price} euros?|Look for {query} up to {max_price} "
          "euros.",
          lambda r, v: {"found": r.randint(1, 40)}, "I found {found} {query} below {max_price} euros."),
    _tool("get_stock", "Get the number of items in the store.", "item", lambda r: {"item": r.choice(ITEMS)},
          "Are there still {item} in the store?|Count the {item} in the store.|I need the stock of {item}.|"
          "How many {item} are in the store?|Stock of {item}?|Do we have {item} in the store?|Check the "
          "stock of {item}.",
          "What is our stock of {item}?|Tell me how many {item} we have in the store.",
          lambda r, v: {"stock": number(r)}, "There are {stock} {item} in the store."),
    _tool("turn_light", "Switch a light.", "room state", lambda r: {
              "room": r.choice(("kitchen", "bathroom", "bedroom", "hall", "office", "garden")),
              "state": r.choice(("on", "off"))},
          "I want the {room} light {state}.|Make the light {state} in the {room}.|The light of the {room}: "
          "{state}.|Can you switch {state} the light in the {room}?|Turn {state} the light in the {room}.|"
          "Switch the {room} light {state}.|Light {state} in the "
          "{room}.|"
          "{room} light {state}",
          "Please put the light in the {room} {state}.|The {room} light should be {state}.",
          lambda r, v: {"ok": True}, "The light in the {room} is {state}."),
    _tool("book_table", "Book a table in a restaurant.", "people:integer day hour:integer", lambda r: {
              "people": r.randint(1, 12), "day": r.choice(DAYS), "hour": r.randint(11, 22)},
          "Get us a table on {day} at {hour}, we are {people}.|On {day} at {hour} we need a table for "
          "{people}.|Dinner for {people} on {day} at {hour}.|Book a table for {people} on {day} at {hour}.|"
          "Table for {people}, {day} at {hour}.|"
          "Reserve a table on {day} at {hour} for {people} people.",
          "We are {people} and want a table on {day} at {hour}.|I need a table on {day} at {hour} for "
          "{people}.",
          lambda r, v: {"table": r.randint(1, 40)}, "Table {table} is booked for {day} at {hour}."),
    _tool("translate", "Translate a word.", "word language", lambda r: {
              "word": r.choice(ANIMALS + FOODS), "language": r.choice(("French", "German", "Italian",
              "Spanish"))},
          "I need {word} in {language}.|The word {word} in {language}, please.|What do they call {word} in "
          "{language}?|Translate {word} into {language}.|What is {word} in {language}?|{word} in "
          "{language}|Say {word} "
          "in {language}.",
          "How do you say {word} in {language}?|Give me the {language} word for {word}.",
          lambda r, v: {"translation": invented(r).lower()}, "{word} in {language} is {translation}."),
    _tool("multiply", "Multiply two numbers.", "a:integer b:integer", lambda r: {
              "a": r.randint(10, 999), "b": r.randint(10, 999)},
          "Find {a} times {b}.|I need the product {a} * {b}.|How much is {a} times {b}?|What is {a} times "
          "{b}?|Multiply {a} and {b}.|{a} * {b}|Calculate {a} times {b}.",
          "What do I get for {a} times {b}?|Work out the product of {a} and {b}.",
          lambda r, v: {"result": v["a"] * v["b"]}, "{a} times {b} is {result}."),
    _tool("get_contact", "Look up a phone number.", "name", lambda r: {"name": first_name(r)},
          "I want to call {name}.|Find the number of {name}.|Do you have the phone number of {name}?|What "
          "is the phone number of {name}?|Phone number of {name}?|Look up {name}.|How can I call "
          "{name}?",
          "Give me {name}'s phone number.|Which number does {name} have?",
          lambda r, v: {"phone": str(r.randint(10000, 99999))}, "The phone number of {name} is {phone}."),
    _tool("find_route", "Find the way between two places.", "start goal", lambda r: {
              "start": city(r), "goal": city(r)},
          "I want to go from {start} to {goal}.|Plan a route from {start} to {goal}.|What is the way from "
          "{start} to {goal}?|How do I get from {start} to {goal}?|Route from {start} to {goal}|Find the "
          "way from {start} to "
          "{goal}.",
          "Show me how to travel from {start} to {goal}.|Which way leads from {start} to {goal}?",
          lambda r, v: {"km": r.randint(3, 990)}, "From {start} to {goal} it is {km} km."),
    _tool("add_to_list", "Add an item to the shopping list.", "item count:integer", lambda r: {
              "item": r.choice(ITEMS + FOODS), "count": r.randint(1, 20)},
          "Note {count} {item} for shopping.|We need {count} {item}, put them on the list.|Buy {count} "
          "{item}: add it to my list.|Add {count} {item} to the shopping list.|Put {count} {item} on my "
          "list.|Shopping list: {count} "
          "{item}.",
          "I need {count} {item} from the shop, note that.|Write {count} {item} on the shopping list.",
          lambda r, v: {"ok": True}, "{count} {item} are on the list."),
)  # fmt: skip


VERBS = ("set", "get", "start", "stop", "find", "make", "open", "check", "count", "move")
NOUNS = (
    "volume",
    "door",
    "job",
    "file",
    "report",
    "user",
    "ticket",
    "robot",
    "camera",
    "queue",
    "price",
    "photo",
)
FIELDS: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "level": ("integer", lambda rng: number(rng)),
    "id": ("integer", lambda rng: number(rng)),
    "count": ("integer", lambda rng: number(rng)),
    "name": ("string", first_name),
    "title": ("string", lambda rng: invented(rng, 3)),
    "place": ("string", city),
    "colour": ("string", lambda rng: rng.choice(COLOURS)),
    "label": ("string", lambda rng: invented(rng)),
    "day": ("string", lambda rng: rng.choice(DAYS)),
}
PLAIN = (
    "{call}: {values}", "Use {call} with {values}.", "Please {words} with {values}.", "Call {call} with "
    "{values}.",
    "{words}, {values}", "Run {call}, {values}.", "I want to {words}: {values}.",
)  # fmt: skip


def made_up(rng: Random) -> Tool:
    """Return an invented tool, so that the model must read the schema."""
    name = f"{rng.choice(VERBS)}_{rng.choice((*NOUNS, invented(rng).lower()))}"
    words = name.replace("_", " the ")
    fields = rng.sample(tuple(FIELDS), rng.randint(1, 3))
    values = " and ".join(f"{field} {{{field}}}" for field in fields)
    asked = tuple(
        plain.replace("{call}", name).replace("{words}", words).replace("{values}", values) for plain in PLAIN
    )
    return Tool(
        name, f"{words.capitalize()}.", {field: FIELDS[field][0] for field in fields},
        lambda rng: {field: FIELDS[field][1](rng) for field in fields},
        Patterns(asked[:-2], asked[-2:]), lambda rng, values: {"ok": True}, "Done.",
    )  # fmt: skip


def offered(rng: Random, wanted: Tool | None) -> tuple[dict[str, Any], ...]:
    """Return the schemas of one to three tools, including `wanted` if it is given."""
    others = [tool for tool in TOOLS if tool is not wanted and {wanted and wanted.name, tool.name} != {"multiply"}]
    chosen = rng.sample(others, rng.choices((0, 1, 2), (3, 4, 3))[0] + (wanted is None))
    tools = [*chosen, wanted] if wanted else chosen
    rng.shuffle(tools)
    return tuple(tool.schema() for tool in tools)


def request(rng: Random, tool: Tool, split: Split) -> tuple[str, dict[str, Any], Values]:
    """Return a question, the call that answers it, and the drawn values."""
    values = tool.draw(rng)
    text = rng.choice(tool.asked.held if split == "held" else tool.asked.train).format(**values)
    text = text[0].upper() + text[1:]
    if split == "train" and rng.random() < 0.3:
        text = decorate(rng, text)
    arguments = {name: values[name] for name in tool.fields}
    return text, {"name": tool.name, "arguments": arguments}, values


def _exchange(rng: Random, tool: Tool, split: Split, thinking: bool) -> tuple[Message, ...]:
    text, call, values = request(rng, tool, split)
    result = tool.returns(rng, values)
    told = tool.told.format(**values, **result)
    told = told[0].upper() + told[1:]
    return (
        Message("user", text),
        Message("assistant", "", f"The tool {tool.name} fits." if thinking else None, (call,)),
        Message("tool", json.dumps(result)),
        Message("assistant", told, "I have the result." if thinking else None),
    )


def document(rng: Random, split: Split) -> Document:
    """Return a conversation with tools: one to three calls with their results, or a question that no tool answers."""
    thinking = rng.random() < 0.15
    system = (Message("system", rng.choice(SYSTEMS)),) if rng.random() < 0.3 else ()
    if rng.random() < 0.15:
        unknown = rng.random() < 0.5
        question, answer = (
            (refusal.ask_unknown(rng, split), refusal.ANSWER) if unknown else penstock.exchange(rng, split)
        )
        asked = (
            Message("user", question),
            Message("assistant", answer, "No tool fits." if thinking else None),
        )
        if not any(word in question.lower() for word in ("weather", "time", "translate", "flight", "price", "who is")):
            return Conversation((*system, *asked), offered(rng, None))
    tool = made_up(rng) if rng.random() < 0.25 else rng.choice(TOOLS)
    tools = offered(rng, tool)
    messages = _exchange(rng, tool, split, thinking)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        again = rng.choice([known for known in (*TOOLS, tool) if known.schema() in tools])
        messages += _exchange(rng, again, split, thinking)
    return Conversation((*system, *messages), tools)


def calls(wanted: dict[str, Any]) -> Callable[[str], bool]:
    """Return a check that is true if the answer is exactly this call."""

    def check(answer: str) -> bool:
        body = answer.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            return json.loads(body) == wanted
        except json.JSONDecodeError:
            return False

    return check


def questions(rng: Random, count: int) -> list[Question]:
    """Return questions that need a call, in phrasings that are not in the training data."""
    asked = []
    for place in range(count):
        tool = TOOLS[place % len(TOOLS)]
        text, call, _ = request(rng, tool, "held")
        asked.append(Question(Conversation((Message("user", text),), offered(rng, tool)), calls(call), call_text(call)))
    return asked


def result_questions(rng: Random, count: int) -> list[Question]:
    """Return questions about a tool's result. An answer is right if it is exactly the expected sentence."""
    asked = []
    for place in range(count):
        tool = TOOLS[place % len(TOOLS)]
        user, call, result, told = _exchange(rng, tool, "held", thinking=False)
        wanted = told.content
        conversation = Conversation((user, call, result), offered(rng, tool))
        asked.append(Question(conversation, lambda answer, wanted=wanted: answer.strip() == wanted, wanted))
    return asked
