"""Grammars in EBNF, in the dialect of llama.cpp (GBNF) and xgrammar: `root ::= "a" [b-z]* | other`.

llguidance's lexer takes the longest match of each lexeme. If `[a-z]+` were a lexeme, `[a-z]+ "x"` would never match,
unlike in EBNF. Therefore a grammar without recursion becomes one regular expression. In other grammars, each lexeme is
one character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.grammar.patterns import expressions
from runtime.grammar.syntax.lark import quoted
from runtime.grammar_spec import InvalidGrammar

MAX_DEPTH = 64
MAX_RULES = 2_000
MAX_REPEAT = 10_000
MAX_REGEX = 64 * 1024  # maximum number of characters of the regular expression
MAX_LEXEMES = 50_000  # maximum number of characters and classes of a grammar that does not become a regular expression

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|\#[^\n]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<define>::=)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<class>\[(?:\\.|[^\]\\\n])*\])
    |(?P<repeat>\{[0-9]{1,9}(?:\s*,\s*[0-9]{0,9})?\s*\}|[*+?])
    |(?P<sign>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}


class Literal(NamedTuple):
    text: str


class Class(NamedTuple):
    regex: str  # a regular expression for one character


class Reference(NamedTuple):
    name: str


class Repeat(NamedTuple):
    item: Node
    low: int
    high: int | None


class Either(NamedTuple):
    rows: list[list[Node]]


Node = Literal | Class | Reference | Repeat | Either


def ebnf_to_lark(source: str) -> str:
    """Return the grammar in llguidance's Lark. Raises `InvalidGrammar` if the grammar is malformed or too large."""
    rules = _Parser(source).parse()
    if "root" not in rules:
        raise InvalidGrammar("it has no rule named root")
    used = _used_rules(rules)
    regex = _as_regex(rules, used)
    if regex is not None:
        return f"start: /{regex}/" if regex else 'start: ""'
    num_lexemes = sum(_num_lexemes(rules[name]) for name in used)
    if num_lexemes > MAX_LEXEMES:
        raise InvalidGrammar(
            f"its texts and classes have {num_lexemes} characters; up to {MAX_LEXEMES} are possible if it is recursive "
            f"or longer than {MAX_REGEX} characters"
        )
    names = {name: "start" if name == "root" else f"r{index}" for index, name in enumerate(used)}
    return "\n".join([f"{names[name]}: {_lark_rows(rules[name], names)}" for name in used])


@dataclass(slots=True)
class _Parser:
    source: str
    tokens: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0
    depth: int = 0

    def parse(self) -> dict[str, Either]:
        self.tokens = list(_tokens(self.source))
        rules: dict[str, Either] = {}
        while self.at < len(self.tokens):
            kind, name = self.take()
            if kind != "name" or self.take()[0] != "define":
                raise InvalidGrammar(f"a rule (name ::= ...) is expected at {name!r:.40}")
            if name in rules:
                raise InvalidGrammar(f"there are two rules named {name}")
            if len(rules) == MAX_RULES:
                raise InvalidGrammar(f"it may have up to {MAX_RULES} rules")
            rules[name] = self.either()
            if self.peek() == ("sign", ")"):
                raise InvalidGrammar("it has a ')' without '('")
        return rules

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else ("end", "")

    def take(self) -> tuple[str, str]:
        token = self.peek()
        self.at += 1
        return token

    def either(self) -> Either:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise InvalidGrammar(f"its groups are nested more than {MAX_DEPTH} deep")
        rows = [self.row()]
        while self.peek() == ("sign", "|"):
            self.at += 1
            rows.append(self.row())
        self.depth -= 1
        return Either(rows)

    def row(self) -> list[Node]:
        row: list[Node] = []
        while True:
            kind, text = self.peek()
            if kind == "end" or (kind == "sign" and text in "|)") or self.peek(1)[0] == "define":
                return row
            self.at += 1
            row.append(self.repeated(self.atom(kind, text)))

    def atom(self, kind: str, text: str) -> Node:
        if kind == "name":
            return Reference(text)
        if kind == "text":
            return Literal(_unescaped(text[1:-1]))
        if kind == "class":
            return Class(_class(text))
        if text == ".":
            return Class("(?s:.)")
        if text != "(":
            raise InvalidGrammar(f"{text!r} is not allowed here")
        inner = self.either()
        if self.take() != ("sign", ")"):
            raise InvalidGrammar("a '(' is not closed")
        return inner

    def repeated(self, item: Node) -> Node:
        while self.peek()[0] == "repeat":
            text = self.take()[1]
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(text) or _bounds(text)
            item = Repeat(item, low, high)
            self.depth += 1
            if self.depth > MAX_DEPTH * 2:
                raise InvalidGrammar("its repetitions are nested too deep")
        self.depth = min(self.depth, MAX_DEPTH)
        return item


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            raise InvalidGrammar(f"it cannot be read from {source[at : at + 20]!r} on")
        at = token.end()
        if token.lastgroup != "skip":
            yield str(token.lastgroup), token[0]


def _bounds(text: str) -> tuple[int, int | None]:
    low, comma, high = text[1:-1].replace(" ", "").partition(",")
    bounds = int(low), (int(high) if high else None) if comma else int(low)
    if bounds[0] > MAX_REPEAT or (bounds[1] or 0) > MAX_REPEAT:
        raise InvalidGrammar(f"repetitions may go up to {MAX_REPEAT}")
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise InvalidGrammar(f"the repetition {text} is empty")
    return bounds


def _unescaped(text: str) -> str:
    return "".join([character for character, _ in _characters(text)])


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (character, whether it is escaped) for each character of a literal or class."""
    at = 0
    while at < len(text):
        if text[at] != "\\":
            yield text[at], False
            at += 1
            continue
        found = _ESCAPE.match(text, at)
        if found is None:
            raise InvalidGrammar("an escape ends too early")
        at = found.end()
        code = found[1] or found[2] or found[3]
        if code is not None:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
                raise InvalidGrammar(f"there is no character {found[0]}")
            yield chr(int(code, 16)), True
        elif found[4].isalnum() and found[4] not in _SIMPLE:
            raise InvalidGrammar(f"the escape {found[0]} is not known")
        else:
            yield _SIMPLE.get(found[4], found[4]), True


def _class(text: str) -> str:
    """Convert a class such as `[a-z]` to a regular expression for one character."""
    inner = text[1:-1]
    negated = inner.startswith("^")
    characters = list(_characters(inner[negated:]))
    parts, at = [], 0
    while at < len(characters):
        first = characters[at][0]
        if characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters):
            last = characters[at + 2][0]
            if last < first:
                raise InvalidGrammar(f"the range {first}-{last} is empty")
            parts.append(f"{expressions.escape(first)}-{expressions.escape(last)}")
            at += 3
        else:
            parts.append(expressions.escape(first))
            at += 1
    if not parts:
        raise InvalidGrammar("a class of characters is empty")
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _references(node: Node | Either) -> Iterator[str]:
    pending: list[Node] = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, Reference):
            yield each.name
        elif isinstance(each, Repeat):
            pending.append(each.item)
        elif isinstance(each, Either):
            pending += [item for row in reversed(each.rows) for item in reversed(row)]


def _used_rules(rules: dict[str, Either]) -> list[str]:
    """Return the names of all rules that `root` uses, `root` first. Raises `InvalidGrammar` for an undefined rule."""
    used, pending = {"root": None}, ["root"]
    while pending:
        for name in _references(rules[pending.pop()]):
            if name not in rules:
                raise InvalidGrammar(f"there is no rule named {name}")
            if name not in used:
                used[name] = None
                pending.append(name)
    return list(used)


def _as_regex(rules: dict[str, Either], used: list[str]) -> str | None:
    """Return the whole grammar as one regular expression, or None if it is recursive or too long."""
    needs = {name: set(_references(rules[name])) for name in used}
    written: dict[str, str] = {}
    while len(written) < len(used):
        ready = [name for name in used if name not in written and needs[name] <= written.keys()]
        if not ready:
            return None
        for name in ready:
            text = _regex(rules[name], written)
            if len(text) > MAX_REGEX:
                return None
            written[name] = text
    return written["root"]


def _regex(node: Node, written: dict[str, str]) -> str:
    if isinstance(node, Literal):
        return expressions.escape(node.text)
    if isinstance(node, Class):
        return node.regex
    if isinstance(node, Reference):
        return written[node.name]
    if isinstance(node, Repeat):
        return f"(?:{_regex(node.item, written)}){{{node.low},{'' if node.high is None else node.high}}}"
    return f"(?:{'|'.join(''.join(_regex(item, written) for item in row) for row in node.rows)})"


def _num_lexemes(node: Node) -> int:
    if isinstance(node, Literal):
        return len(node.text)
    if isinstance(node, Repeat):
        return _num_lexemes(node.item)
    if isinstance(node, Either):
        return sum(_num_lexemes(item) for row in node.rows for item in row)
    return 1


def _lark_rows(either: Either, names: dict[str, str]) -> str:
    return " | ".join([" ".join([_lark(item, names) for item in row]) or '""' for row in either.rows])


def _lark(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Literal):
        return " ".join([quoted(character) for character in node.text]) or '""'
    if isinstance(node, Class):
        return f"/{node.regex}/"
    if isinstance(node, Reference):
        return names[node.name]
    if isinstance(node, Repeat):
        inner = f"({_lark(node.item, names)})"
        if node.low == 0 and node.high is None:
            return inner + "*"
        return f"{inner}{{{node.low},{'' if node.high is None else node.high}}}"
    return f"({_lark_rows(node, names)})"
