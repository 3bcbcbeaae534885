"""Small tables of general knowledge: capitals, months, planets, symbols, opposites, and more."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo_model.conversation import Conversation, Document, Message, Question, Split, ask, says
from demo_model.phrasing import DAYS, MONTHS, Patterns, maybe_system


@dataclass(frozen=True)
class Table:
    """Keys with their values, the questions about a value, and the phrasing of the answer."""

    rows: dict[str, str]
    asked: Patterns
    answer: str


def _pairs(text: str) -> dict[str, str]:
    """Parse `key:value` pairs separated by commas."""
    return dict((part.strip().split(":")) for part in text.split(","))  # type: ignore[misc]


CAPITALS = _pairs(
    "France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, Austria:Vienna, "
    "Switzerland:Bern, "
    "Belgium:Brussels, the Netherlands:Amsterdam, Denmark:Copenhagen, Norway:Oslo, Sweden:Stockholm, "
    "Finland:Helsinki, Iceland:Reykjavik, Ireland:Dublin, the United Kingdom:London, Poland:Warsaw, "
    "the Czech Republic:Prague, Slovakia:Bratislava, Hungary:Budapest, Romania:Bucharest, Bulgaria:Sofia, "
    "Greece:Athens, Turkey:Ankara, Croatia:Zagreb, Serbia:Belgrade, Slovenia:Ljubljana, Ukraine:Kyiv, "
    "Estonia:Tallinn, Latvia:Riga, Lithuania:Vilnius, Russia:Moscow, China:Beijing, Japan:Tokyo, South "
    "Korea:Seoul, "
    "India:New Delhi, Pakistan:Islamabad, Thailand:Bangkok, Vietnam:Hanoi, Indonesia:Jakarta, "
    "the Philippines:Manila, Australia:Canberra, New Zealand:Wellington, Egypt:Cairo, Morocco:Rabat, "
    "Kenya:Nairobi, "
    "Nigeria:Abuja, Ghana:Accra, Ethiopia:Addis Ababa, Canada:Ottawa, the United States:Washington, "
    "Mexico:Mexico City, Cuba:Havana, Brazil:Brasilia, Argentina:Buenos Aires, Chile:Santiago, Peru:Lima, "
    "Colombia:Bogota, Ecuador:Quito, Uruguay:Montevideo"
)
SYMBOLS = _pairs(
    "hydrogen:H, helium:He, carbon:C, nitrogen:N, oxygen:O, sodium:Na, magnesium:Mg, aluminium:Al, "
    "silicon:Si, "
    "sulfur:S, chlorine:Cl, potassium:K, calcium:Ca, iron:Fe, copper:Cu, zinc:Zn, silver:Ag, tin:Sn, "
    "gold:Au, "
    "mercury:Hg, lead:Pb, uranium:U"
)
OPPOSITES = _pairs(
    "hot:cold, big:small, up:down, left:right, day:night, black:white, fast:slow, old:young, open:closed, "
    "full:empty, happy:sad, hard:soft, high:low, light:dark, long:short, loud:quiet, near:far, rich:poor, "
    "strong:weak, thick:thin, true:false, wet:dry, early:late, first:last, inside:outside, love:hate, "
    "buy:sell, "
    "begin:end, win:lose, push:pull"
)
YOUNG = _pairs(
    "dog:puppy, cat:kitten, cow:calf, sheep:lamb, horse:foal, pig:piglet, hen:chick, duck:duckling, "
    "bear:cub, "
    "goat:kid, frog:tadpole, deer:fawn, swan:cygnet, kangaroo:joey"
)
LANGUAGES = _pairs(
    "France:French, Germany:German, Italy:Italian, Spain:Spanish, Portugal:Portuguese, Brazil:Portuguese, "
    "Japan:Japanese, China:Chinese, Russia:Russian, Poland:Polish, Greece:Greek, Mexico:Spanish, "
    "Austria:German, "
    "Sweden:Swedish, Norway:Norwegian, Denmark:Danish, Finland:Finnish, Hungary:Hungarian, Turkey:Turkish, "
    "Thailand:Thai, the Netherlands:Dutch, Egypt:Arabic"
)
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
"eleventh", "twelfth")  # fmt: skip
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LEGS = _pairs("spider:8, dog:4, bird:2, ant:6, human:2, horse:4, bee:6, cat:4, octopus:0, duck:2, beetle:6, snake:0")
SIDES = _pairs("triangle:3, square:4, pentagon:5, hexagon:6, octagon:8, rectangle:4, heptagon:7, decagon:10")
ROMAN = _pairs(
    "I:1, II:2, III:3, IV:4, V:5, VI:6, VII:7, VIII:8, IX:9, X:10, XI:11, XII:12, L:50, C:100, D:500, M:1000"
)


def _after(names: tuple[str, ...]) -> dict[str, str]:
    return {name: names[(place + 1) % len(names)] for place, name in enumerate(names)}


def _before(names: tuple[str, ...]) -> dict[str, str]:
    return {name: names[place - 1] for place, name in enumerate(names)}


TABLES: dict[str, Table] = {
    "capital": Table(
        CAPITALS,
        Patterns(
            ("What is the capital of {key}?", "Capital of {key}?", "Which city is the capital of {key}?",
             "Name the capital of {key}.", "What's the capital city of {key}?", "the capital of {key}",
             "I need the capital of {key}.", "{key}: capital?",
             "Do you know the capital of {key}?", "Which capital does {key} have?", "{key}'s capital city, "
             "please."),
            ("Tell me the capital of {key}.", "Do you know {key}'s capital?", "{key} has which capital?"),
        ),
        "The capital of {key} is {value}.",
    ),
    "country": Table(
        {value: key for key, value in CAPITALS.items()},
        Patterns(
            ("{key} is the capital of which country?", "Which country has {key} as its capital?",
             "What country is {key} the capital of?", "{key} is a capital. Of what?", "Whose capital is "
             "{key}?"),
            ("Of which country is {key} the capital?", "Tell me which country's capital is {key}."),
        ),
        "{key} is the capital of {value}.",
    ),
    "symbol": Table(
        SYMBOLS,
        Patterns(
            ("What is the chemical symbol of {key}?", "Symbol for {key}?", "What is the symbol of {key}?",
             "Which symbol does {key} have?", "chemical symbol for {key}", "How do chemists write "
             "{key}?", "I need the symbol of {key}."),
            ("Tell me the chemical symbol for {key}.", "How is {key} written as a chemical symbol?"),
        ),
        "The symbol of {key} is {value}.",
    ),
    "opposite": Table(
        OPPOSITES,
        Patterns(
            ("What is the opposite of {key}?", "Opposite of {key}?", "Give the opposite of {key}.",
             "Name the opposite of the word {key}.", "Find a word that is the opposite of {key}.",
             "I look for the opposite of {key}."),
            ("Tell me the opposite of {key}.", "Which word means the opposite of {key}?"),
        ),
        "The opposite of {key} is {value}.",
    ),
    "young": Table(
        YOUNG,
        Patterns(
            ("What is a young {key} called?", "What do you call a baby {key}?", "Name of a young {key}?",
             "A baby {key} is called what?", "What name does a young {key} have?"),
            ("Tell me the word for a young {key}.", "How is a baby {key} called?"),
        ),
        "A young {key} is called a {value}.",
    ),
    "language": Table(
        LANGUAGES,
        Patterns(
            ("Which language is spoken in {key}?", "What language do people speak in {key}?", "Language of "
            "{key}?",
             "Name the language of {key}.", "What do they speak in {key}?", "{key}: which language?"),
            ("Tell me the language of {key}.", "In {key}, which language do they speak?"),
        ),
        "People in {key} speak {value}.",
    ),
    "planet": Table(
        dict(zip(ORDINALS, PLANETS)),
        Patterns(
            ("What is the {key} planet from the sun?", "Which planet is the {key} from the sun?",
             "Name the {key} planet.", "I need the {key} planet of our sun.", "{key} planet?"),
            ("Tell me the {key} planet of the solar system.", "Counting from the sun, which planet is "
            "{key}?"),
        ),
        "The {key} planet from the sun is {value}.",
    ),
    "month": Table(
        dict(zip(ORDINALS, MONTHS)),
        Patterns(
            ("What is the {key} month?", "Which month is the {key} of the year?", "Name the {key} month of "
            "the year."),
            ("Tell me the {key} month of the year.", "In a year, which month comes {key}?"),
        ),
        "The {key} month is {value}.",
    ),
    "length": Table(
        {month: str(days) for month, days in zip(MONTHS, LENGTHS)},
        Patterns(
            ("How many days does {key} have?", "How many days are in {key}?", "Number of days in {key}?",
             "How long is {key} in days?", "{key}: how many days?", "Count the days of {key}."),
            ("Tell me the number of days in {key}.", "{key} has how many days?"),
        ),
        "{key} has {value} days.",
    ),
    "next day": Table(
        _after(DAYS),
        Patterns(
            ("Which day comes after {key}?", "What day follows {key}?", "What is the day after {key}?",
            "Next day after {key}?", "It is {key}. Which day comes next?"),
            ("Tell me the day after {key}.", "After {key}, which day comes?"),
        ),
        "After {key} comes {value}.",
    ),
    "previous day": Table(
        _before(DAYS),
        Patterns(
            ("Which day comes before {key}?", "What day precedes {key}?", "What is the day before "
            "{key}?", "Today is {key}. Which day was yesterday?", "Previous day of {key}?"),
            ("Tell me the day before {key}.", "Before {key}, which day comes?"),
        ),
        "Before {key} comes {value}.",
    ),
    "next month": Table(
        _after(MONTHS),
        Patterns(
            ("Which month comes after {key}?", "What month follows {key}?", "What is the month after "
            "{key}?", "Next month after {key}?", "It is {key}. Which month comes next?"),
            ("Tell me the month after {key}.", "After {key}, which month comes?"),
        ),
        "After {key} comes {value}.",
    ),
    "legs": Table(
        LEGS,
        Patterns(
            ("How many legs does a {key} have?", "Number of legs of a {key}?", "How many legs has a "
            "{key}?", "Count the legs of a {key}.", "On how many legs does a {key} walk?"),
            ("Tell me how many legs a {key} has.", "A {key} has how many legs?"),
        ),
        "Legs of a {key}: {value}.",
    ),
    "sides": Table(
        SIDES,
        Patterns(
            ("How many sides does a {key} have?", "Number of sides of a {key}?", "How many sides has a "
            "{key}?"),
            ("Tell me how many sides a {key} has.", "A {key} has how many sides?"),
        ),
        "A {key} has {value} sides.",
    ),
    "roman": Table(
        ROMAN,
        Patterns(
            ("What number is the Roman numeral {key}?", "Roman numeral {key} as a number?",
             "Which number is {key} in Roman numerals?", "Read the Roman numeral {key}.", "What does the "
             "Roman {key} stand for?"),
            ("Tell me the value of the Roman numeral {key}.", "The Roman numeral {key} means which number?"),
        ),
        "The Roman numeral {key} is {value}.",
    ),
}  # fmt: skip
WEIGHTS = tuple(len(table.rows) for table in TABLES.values())


def document(rng: Random, split: Split) -> Document:
    """Return a document with one row of one table."""
    table = rng.choices(tuple(TABLES.values()), WEIGHTS)[0]
    key, value = rng.choice(tuple(table.rows.items()))
    answer = table.answer.format(key=key, value=value)
    answer = answer[0].upper() + answer[1:]
    thought = "I know this from a table." if rng.random() < 0.2 else None
    question = table.asked.pick(rng, split, key=key)
    return ask(question[0].upper() + question[1:], answer, thought, maybe_system(rng))


def questions(rng: Random) -> list[Question]:
    """Return every row of every table once, in a phrasing that is not in the training data."""
    asked = []
    for table in TABLES.values():
        for key, value in table.rows.items():
            text = table.asked.pick(rng, "held", key=key)
            conversation = Conversation((Message("user", text[0].upper() + text[1:]),))
            wanted = table.answer.format(key=key, value=value).rstrip(".")
            ending = wanted[wanted.rindex(value) :]
            asked.append(Question(conversation, says(" " + ending), ending))
    return asked
