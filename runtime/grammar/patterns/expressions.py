"""Parse regular expressions of JSON schemas and requests, and write them for llguidance.

JSON Schema reads a pattern as ECMA-262, many validators read it as Python's dialect, and llguidance reads Rust's
dialect. The dialects differ in `\\d`, `\\w`, `\\s` and `.`, in operators inside classes, and in anchors. The written
expression matches only texts that match in both ECMA-262 and Python, and it means the same in all dialects. Patterns
for which there is no such expression are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_DEPTH = 64
# Maximum number of characters of all patterns of a grammar together. Four times as many take 2 s to compile.
MAX_PATTERN = 128 * 1024
MAX_REPEAT = 65_535
MAX_LEAST = 20_000  # maximum length of the shortest matching text
# Maximum of the product `_least` * `_spare`, which estimates the states that llguidance visits. This many take 1 s.
MAX_AMBIGUOUS = 6_000_000

MAX_BRANCHES = 64  # maximum number of branches after groups with anchors are expanded

ANYTHING = "(?s:.*)"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_SPACES = r"\t\n\x0b\x0c\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# The characters that a class matches in both dialects (_NARROW), and in at least one dialect (_WIDE). A negated class
# such as `\D` excludes the wide characters.
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_WIDE = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": _SPACES + r"\x1c-\x1f\x85\x{feff}"}
# `_WIDE` with all characters beyond ASCII in place of Unicode properties.
_WIDEST = {"d": r"0-9\x{80}-\x{10ffff}", "w": r"0-9A-Za-z_\x{80}-\x{10ffff}", "s": _WIDE["s"]}
# Characters that JSON strings of an output may not contain: control characters without a short escape, because
# \\u escapes are disabled (see `backends.grammar_text`), and DEL.
UNWRITTEN = frozenset(map(chr, (*range(0x08), 0x0B, *range(0x0E, 0x20), 0x7F)))
_NOTHING = r"[\x{0}\x{1}]"  # a class that never matches, because no JSON string has these characters
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


class PatternError(ValueError):
    """Raised if a pattern is malformed, or cannot be enforced exactly."""


@dataclass(slots=True)
class PatternBudget:
    """Number of characters that are left for further patterns of one grammar."""

    left: int = MAX_PATTERN

    def take(self, pattern: str) -> None:
        """Subtract the length of `pattern`. Raises `PatternError` if too few characters are left."""
        self.left -= len(pattern)
        if self.left < 0:
            raise PatternError(f"all patterns together may have up to {MAX_PATTERN} characters")


class Text(NamedTuple):
    """A character or class in llguidance's syntax."""

    regex: str


class Start(NamedTuple):
    """The anchor `^`."""


class End(NamedTuple):
    """The anchor `$`."""


class Either(NamedTuple):
    branches: list[Row]


class Repeat(NamedTuple):
    item: Node
    low: int
    high: int | None


Node = Text | Start | End | Either | Repeat
Row = list[Node]  # nodes that match one after the other


def search(pattern: str) -> str:
    """Return an expression for whole texts that contain a match of `pattern`, as in JSON Schema.

    Raises `PatternError` if the pattern is malformed, or cannot be enforced exactly.
    """
    return _anchored(pattern, ANYTHING)


def full(pattern: str) -> str:
    """Return an expression for texts that match `pattern` from beginning to end. Anchors at its ends have no effect.

    Raises `PatternError` if the pattern is malformed, or cannot be enforced exactly.
    """
    return _anchored(pattern, "")


def rows(pattern: str, *, is_wide: bool) -> Iterator[tuple[bool, Row, bool]]:
    """Yield each alternative of a pattern as (is anchored at the start, nodes, is anchored at the end).

    The nodes match the texts that match in ECMA-262 and in Python. If `is_wide`, the nodes match all texts that match
    in at least one dialect, and possibly further texts beyond ASCII. Python's `$` also matches before a final line
    break; the caller must handle this. Raises `PatternError` if the pattern is malformed or not supported.
    """
    inner, outer = (_WIDEST, _NARROW) if is_wide else (_NARROW, _WIDEST)
    dot = r"[^\n]" if is_wide else _DOT
    return _stripped(_Parser(pattern, inner=inner, outer=outer, dot=dot).parse())


def _stripped(parsed: Either) -> Iterator[tuple[bool, Row, bool]]:
    """Yield each branch as (is anchored at the start, nodes without these anchors, is anchored at the end)."""
    for row in _branches(parsed):
        at_start = at_end = False
        while row and isinstance(row[0], Start):
            row, at_start = row[1:], True
        while row and isinstance(row[-1], End):
            row, at_end = row[:-1], True
        yield at_start, row, at_end


def escape(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join([_literal(character) for character in text])


def _anchored(pattern: str, around: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"a pattern may have up to {MAX_PATTERN} characters, not {len(pattern)}")
    written = []
    parsed = _Parser(pattern, in_json=bool(around)).parse()
    if _least(parsed) > MAX_LEAST:
        raise PatternError(f"it must match a text of up to {MAX_LEAST} characters")
    if _least(parsed) * _spare(parsed) > MAX_AMBIGUOUS and not _is_one_repeat(parsed):
        raise PatternError("its repetitions are too ambiguous")
    for at_start, row, at_end in _stripped(parsed):
        begin, end = "" if at_start else around, "" if at_end else around
        if row or not (begin and end):
            body = _write_row(row)
            written.append(begin + body + end)
        else:
            written.append(begin)
    return written[0] if len(written) == 1 else f"(?:{'|'.join(written)})"


def _least(node: Node) -> int:
    """Return the approximate length of the shortest matching text."""
    if isinstance(node, Repeat):
        return node.low * _least(node.item)
    if isinstance(node, Either):
        return min(sum(_least(item) for item in row) for row in node.branches)
    return int(isinstance(node, Text))


def _spare(node: Node) -> int:
    """Return the approximate number of characters that a match may have in addition to the shortest match.

    A repetition without an upper limit counts as one repetition more than its minimum.
    """
    if isinstance(node, Repeat):
        span = 1 if node.high is None else node.high - node.low
        return span * max(_least(node.item), 1) + node.low * _spare(node.item)
    if isinstance(node, Either):
        return max(sum(_spare(item) for item in row) for row in node.branches)
    return 0


def _is_one_repeat(node: Either) -> bool:
    """Whether the pattern consists of one repeated character or class. Such a pattern is never ambiguous."""
    items = [item for row in node.branches for item in row if not isinstance(item, Start | End)]
    return len(items) == 1 and isinstance(items[0], Repeat) and isinstance(items[0].item, Text)


def _branches(node: Either) -> list[Row]:
    """Return the branches of an alternation. A group with anchors at the end of a branch is expanded into branches."""
    branches: list[Row] = []
    pending = [(row, 0) for row in reversed(node.branches)]
    while pending:
        row, depth = pending.pop()
        index = next((i for i in (0, len(row) - 1) if row and _holds_anchors(row[i])), None)
        if index is None:
            branches.append(row)
        else:
            group = row[index]
            if not isinstance(group, Either):
                raise PatternError("an anchor in a repetition cannot be enforced")
            pending += [([*row[:index], *branch, *row[index + 1 :]], depth + 1) for branch in reversed(group.branches)]
        if len(branches) + len(pending) > MAX_BRANCHES and len(node.branches) <= MAX_BRANCHES:
            raise PatternError("it has too many anchors in groups")
    return branches


def _holds_anchors(node: Node) -> bool:
    """Whether an alternation or a repetition contains an anchor."""
    if isinstance(node, Repeat):
        return isinstance(node.item, Start | End) or _holds_anchors(node.item)
    if not isinstance(node, Either):
        return False
    return any(isinstance(item, Start | End) or _holds_anchors(item) for branch in node.branches for item in branch)


def _write_row(row: Row) -> str:
    return "".join([_write(item) for item in row])


def _write(node: Node) -> str:
    if isinstance(node, Text):
        return node.regex
    if isinstance(node, Either):
        return f"(?:{'|'.join([_write_row(row) for row in node.branches])})"
    if isinstance(node, Repeat):
        high = "" if node.high is None else node.high
        return f"(?:{_write(node.item)}){{{node.low},{high}}}"
    raise PatternError("anchors are enforced only at the ends of a pattern or of its alternatives")


def _literal(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise PatternError("half a surrogate pair is no text")
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


@dataclass(slots=True)
class _Parser:
    """A recursive-descent parser for patterns with up to `MAX_DEPTH` nested groups."""

    pattern: str
    in_json: bool = False  # whether the pattern is for a JSON string, which may contain escapes
    inner: Mapping[str, str] = field(default_factory=lambda: _NARROW)  # the characters of classes such as \\d
    outer: Mapping[str, str] = field(default_factory=lambda: _WIDE)  # the characters that \\D and so on exclude
    dot: str = _DOT
    at: int = 0
    depth: int = 0

    def parse(self) -> Either:
        found = self._either()
        if self.at < len(self.pattern):
            raise PatternError(f"there is a ')' without '(' at {self.at}")
        return found

    def _peek(self, length: int = 1) -> str:
        return self.pattern[self.at : self.at + length]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternError("it ends too early")
        self.at += 1
        return character

    def _either(self) -> Either:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise PatternError(f"groups may be nested {MAX_DEPTH} deep")
        branches = [self._row()]
        while self._peek() == "|":
            self.at += 1
            branches.append(self._row())
        self.depth -= 1
        return Either(branches)

    def _row(self) -> Row:
        row: Row = []
        while self._peek() not in ("", "|", ")"):
            row.append(self._quantified(self._atom()))
        return row

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Text(self._class())
        if character == "\\":
            return Text(self._escape())
        if character in "*+?":
            raise PatternError(f"there is nothing to repeat at {self.at - 1}")
        special: dict[str, Node] = {".": Text(self.dot), "^": Start(), "$": End()}
        return special[character] if character in special else Text(self._single(character))

    def _group(self) -> Node:
        if self._peek() == "?":
            self.at += 1
            kind = self._take()
            if kind != ":":
                raise PatternError("look-around, flags, names of groups and references to groups are not supported")
        inner = self._either()
        if self._peek() != ")":
            raise PatternError("a '(' is not closed")
        self.at += 1
        return inner if len(inner.branches) != 1 or len(inner.branches[0]) != 1 else inner.branches[0][0]

    def _quantified(self, item: Node) -> Node:
        bounds = self._quantifier()
        if bounds is None:
            return item
        if isinstance(item, Start | End):
            raise PatternError("an anchor in a repetition cannot be enforced")
        if self._peek() == "?":  # a lazy repetition matches the same texts
            self.at += 1
        if self._peek() == "+" or self._quantifier() is not None:
            raise PatternError(f"there are two repetitions at {self.at - 1}")
        low, high = bounds
        if max(low, high or 0) > MAX_REPEAT:
            raise PatternError(f"repetitions may go up to {MAX_REPEAT}")
        if high is not None and high < low:
            raise PatternError(f"the repetition {{{low},{high}}} is empty")
        return Repeat(item, low, high)

    def _quantifier(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if simple is not None:
            self.at += 1
            return simple
        if self._peek() != "{":
            return None
        end = self.pattern.find("}", self.at, self.at + 16)
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        digits = [part for part in (low, high) if part]
        if end < 0 or not digits or not all(part.isascii() and part.isdigit() for part in digits):
            return None  # the brace is an ordinary character
        if not low:
            raise PatternError("{,n} means different things in different dialects")
        self.at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def _escape(self) -> str:
        character = self._take()
        if character.lower() in _NARROW:
            return f"[{self._class_escape(character, negated=False)}]"
        return self._single(self._escaped_character(character))

    def _single(self, character: str) -> str:
        return _NOTHING if self.in_json and character in UNWRITTEN else _literal(character)

    def _escaped_character(self, character: str) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not self._peek().isdigit():
            return "\0"
        if character == "x":
            return self._hex(2)
        if character == "u":
            return self._unicode()
        if character == "c" and self._peek().isascii() and self._peek().isalpha():
            return chr(ord(self._take()) % 32)
        if character.isalnum():
            raise PatternError(f"\\{character} cannot be enforced")
        return character

    def _hex(self, length: int) -> str:
        digits = self._peek(length)
        if len(digits) < length or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise PatternError(f"there are no {length} hexadecimal digits at {self.at}")
        self.at += length
        return chr(int(digits, 16))

    def _unicode(self) -> str:
        if self._peek() != "{":
            first = self._hex(4)
            if "\ud800" <= first <= "\udbff" and self._peek(2) == "\\u":
                self.at += 2
                return (first + self._hex(4)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return first
        end = self.pattern.find("}", self.at, self.at + 9)
        digits = self.pattern[self.at + 1 : end]
        if end < 0 or not digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise PatternError(f"there is no code point at {self.at}")
        if int(digits, 16) > 0x10FFFF:
            raise PatternError(f"there is no code point {digits}")
        self.at = end + 1
        return chr(int(digits, 16))

    def _class(self) -> str:
        negated = self._peek() == "^"
        self.at += negated
        begin, parts = self.at, list[str]()
        covered, begins_with_controls = set[str](), False
        while self._peek() != "]":
            first = last = self._class_item(negated)
            if self._peek() == "-" and self._peek(2) != "-]":
                self.at += 1
                last = self._class_item(negated)
                if first[1] is None or last[1] is None or first[1] > last[1]:
                    raise PatternError(f"there is no range of characters at {self.at}")
                parts.append(f"{first[0]}-{last[0]}")
            else:
                parts.append(first[0])
            if self.in_json and not negated and first == last and first[1] in UNWRITTEN:
                parts.pop()
            if first[1] is not None and last[1] is not None:
                covered |= {each for each in '"\\' if first[1] <= each <= last[1]}
                begins_with_controls = begins_with_controls or (first[1] < " " and first[1] < last[1])
        if self.in_json and not negated and begins_with_controls and len(covered) < 2:
            raise PatternError("a range of control characters beside a missing quote or backslash is not enforced")
        if self.in_json and negated and covered:
            # The class may exclude the quote or the backslash. llguidance would still accept the escaped quote or
            # backslash, unless the class also excludes control characters.
            parts.append(r"\x00-\x1f")
        if self.at == begin:
            raise PatternError("an empty class means different things in different dialects")
        self.at += 1
        if not parts:
            return _NOTHING
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_item(self, negated: bool) -> tuple[str, str | None]:
        """Return an item of a class in llguidance's syntax, and its character (None for a class such as `\\d`)."""
        character = self._take()
        if character == "\\":
            character = self._take()
            if character.lower() in _NARROW:
                return self._class_escape(character, negated), None
            character = "\b" if character == "b" else self._escaped_character(character)
        return _literal(character), character

    def _class_escape(self, character: str, negated: bool) -> str:
        if character.islower():
            return (self.outer if negated else self.inner)[character]
        return f"[^{(self.inner if negated else self.outer)[character.lower()]}]"
