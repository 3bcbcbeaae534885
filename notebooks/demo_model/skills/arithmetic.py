"""Sums and differences of numbers with up to three digits, and small products.

Answers may contain a written calculation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Literal

from demo_model.conversation import Conversation, Document, Message, Prose, Question, Split, ask
from demo_model.phrasing import Patterns, first_name, maybe_system, number

Sign = Literal["+", "-", "*"]

ASKED: dict[Sign, Patterns] = {
    "+": Patterns(
        (
            "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}", "What is {a} plus {b}?",
            "Add {a} and {b}.",
            "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "How much is {a} plus {b}?",
            "{a}+{b}=",
            "Compute {a} plus {b}.", "{a} plus {b} is what?", "Solve {a} + {b}.", "I need {a} + {b}.",
        ),
        ("Can you work out {a} + {b} for me?", "Tell me what {a} plus {b} makes.", "Find the sum of {a} and "
        "{b}."),
    ),
    "-": Patterns(
        (
            "What is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}", "What is {a} minus {b}?",
            "Calculate {a} - {b}.", "How much is {a} minus {b}?", "{a}-{b}=", "Compute {a} minus {b}.",
            "{a} minus {b} is what?", "Solve {a} - {b}.", "I need {a} - {b}.", "Subtract {b} from {a}.",
            "What is the difference of {a} and {b}?",
        ),
        ("Can you work out {a} - {b} for me?", "Tell me what {a} minus {b} makes.", "Find the difference of "
        "{a} and {b}."),
    ),
    "*": Patterns(
        (
            "What is {a} * {b}?", "{a} * {b}", "What is {a} times {b}?", "Multiply {a} and {b}.",
            "Calculate {a} * {b}.",
            "How much is {a} times {b}?", "{a} x {b}", "What is the product of {a} and {b}?", "{a}*{b}=",
        ),
        ("Can you work out {a} * {b} for me?", "Tell me what {a} times {b} makes.", "Find the product of "
        "{a} and {b}."),
    ),
}  # fmt: skip
STORIES: tuple[tuple[Sign, str], ...] = (
    ("+", "{n} has {a} coins and finds {b} more. How many coins does {n} have now?"),
    ("+", "There are {a} red balls and {b} blue balls. How many balls are there?"),
    ("+", "{n} read {a} pages yesterday and {b} pages today. How many pages is that?"),
    ("-", "{n} has {a} coins and gives away {b}. How many are left?"),
    ("-", "There are {a} people on the train and {b} get off. How many stay?"),
    ("-", "{n} had {a} apples and ate {b}. How many apples are left?"),
)


def is_held(a: int, b: int, sign: Sign) -> bool:
    """Whether this problem is held out for the evaluation. About one in sixteen problems is."""
    return (a * 7919 + b * 104_729 + ord(sign) * 31) % 16 == 3 and a + b > 30


def result(a: int, b: int, sign: Sign) -> int:
    """Return the correct result."""
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def problem(rng: Random, split: Split) -> tuple[int, int, Sign]:
    """Return two numbers and an operator. Most are sums and differences of three-digit numbers."""
    while True:
        sign: Sign = rng.choices(("+", "-", "*"), (10, 11, 4))[0]
        if sign == "*":
            a, b = rng.randint(0, 12), rng.randint(0, 12)
            if rng.random() < 0.4:
                a = rng.randint(11, 99)
                b = rng.randint(2, 9)
        elif rng.random() < 0.6:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
        else:
            a, b = number(rng), number(rng)
        if sign == "-" and a < b and rng.random() < 0.8:
            a, b = b, a
        if is_held(a, b, sign) == (split == "held"):
            return a, b, sign


def _columns(a: int, b: int, sign: Sign) -> list[str]:
    """Return the steps of the written calculation, from the last digit on. A difference needs a >= b."""
    lines, carry = [], 0
    width = len(str(max(a, b)))
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width)), strict=True):
        if sign == "+":
            total = int(x) + int(y) + carry
            lines.append(f"{x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
            carry = total // 10
        else:
            total = int(x) - int(y) - carry
            borrowed = int(total < 0)
            lines.append(f"{x} - {y} - {carry} = {total}, write {total % 10}, borrow {borrowed}")
            carry = borrowed
    return lines


def thought(a: int, b: int, sign: Sign) -> str:
    """Return the steps of the written calculation."""
    if sign == "*":
        if a < 13 and b < 13:
            return f"{a} * {b} = {a * b}"
        tens, ones = a // 10 * 10, a % 10
        return f"{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n{tens * b} + {ones * b} = {a * b}"
    if sign == "-" and a < b:
        return f"{a} is less than {b}.\n" + thought(b, a, "-") + f"\n{a} - {b} = {a - b}"
    return "\n".join([f"{a} {sign} {b}", *_columns(a, b, sign), f"{a} {sign} {b} = {result(a, b, sign)}"])


def expanded(a: int, b: int) -> str:
    """Return a sum or difference (b negative) column by column, largest first: 482 + 379 gives 700 + 150 + 11."""
    width = len(str(max(a, abs(b))))
    parts = []
    for place in reversed(range(width)):
        unit = 10**place
        column = (a // unit % 10 + abs(b) // unit % 10 * (1 if b >= 0 else -1)) * unit
        parts.append(f"{'-' if column < 0 else '+'} {abs(column)}")
    return " ".join(parts).removeprefix("+ ")


def answered(a: int, b: int, sign: Sign) -> str:
    """Return the answer without a thought. For numbers of several digits, it has the results of the columns."""
    value = result(a, b, sign)
    if sign == "*" and max(a, b) > 12:
        return f"{a} * {b} = {a // 10 * 10 * b} + {a % 10 * b} = {value}"
    if sign == "*" or max(a, b) < 10:
        return f"{a} {sign} {b} = {value}"
    if value < 0:
        return f"{a} - {b} = -({expanded(b, -a)}) = {value}"
    return f"{a} {sign} {b} = {expanded(a, b if sign == '+' else -b)} = {value}"


def _drill(rng: Random, split: Split) -> Prose:
    """Return a sheet of problems. Only the results are learnt, because the operands are random."""
    pieces = []
    for _ in range(rng.randint(4, 10)):
        a, b, sign = problem(rng, split)
        asked, _, worked = answered(a, b, sign).partition(" =")
        pieces += [(f"{asked} =", False), (f"{worked}\n", True)]
    return Prose("".join(text for text, _ in pieces), tuple(pieces))


def _chain(rng: Random, split: Split) -> Conversation:
    """Return several problems in one conversation."""
    messages: list[Message] = []
    thinking = rng.random() < 0.35
    for _ in range(rng.randint(2, 4)):
        exchange = _single(rng, split, thinking)
        messages.extend(exchange.messages)
    return Conversation(tuple(messages))


def _single(rng: Random, split: Split, thinking: bool, system: str = "") -> Conversation:
    a, b, sign = problem(rng, split)
    question = ASKED[sign].pick(rng, split, a=a, b=b)
    if rng.random() < 0.08 and sign != "*" and a >= b:
        question = rng.choice([s for s in STORIES if s[0] == sign])[1].format(a=a, b=b, n=first_name(rng))
    answer = f"{a} {sign} {b} = {result(a, b, sign)}" if thinking else answered(a, b, sign)
    return ask(question, answer, thought(a, b, sign) if thinking else None, system)


def document(rng: Random, split: Split) -> Document:
    """Return a sheet of problems, one problem, or several problems in a row."""
    chance = rng.random()
    if chance < 0.2:
        return _drill(rng, split)
    if chance < 0.5:
        return _chain(rng, split)
    return _single(rng, split, rng.random() < 0.45, maybe_system(rng))


def ends_with(value: int) -> Callable[[str], bool]:
    """Return a check that is true if the last number of the answer is the value."""

    def check(answer: str) -> bool:
        found = re.findall(r"-?\d+", answer.split("=")[-1])
        return bool(found) and found[-1] == str(value)

    return check


def questions(rng: Random, count: int, thinking: bool, signs: str = "+-") -> list[Question]:
    """Return held-out problems in phrasings that are not in the training data."""
    asked: list[Question] = []
    while len(asked) < count:
        a, b, sign = problem(rng, "held")
        if sign in signs:
            conversation = Conversation((Message("user", ASKED[sign].pick(rng, "held", a=a, b=b)),))
            value = result(a, b, sign)
            asked.append(Question(conversation, ends_with(value), str(value), thinking))
    return asked
