"""Convert regular expressions to automata, for intersections, complements and disjoint partitions.

The dialects ECMA-262 and Python differ, so each pattern has two readings. The narrow reading matches texts that match
in both dialects. The wide reading matches texts that match in at least one dialect; there, every character beyond ASCII
counts as a digit and as a letter. If a text must not match a pattern, the wide reading is used, so that the text
matches in neither dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from runtime.grammar.patterns.expressions import Either, Node, PatternError, Repeat, Row, Text, rows

MAX_LETTERS = 1_000  # maximum number of characters of all patterns together
MAX_PARTS = 3_000  # maximum number of states of the nondeterministic automaton
MAX_STATES = 600  # maximum number of states of the deterministic automaton
MAX_STEPS = 100_000  # maximum number of transitions that are visited
MAX_WRITTEN_STATES = 150  # maximum number of states of an automaton that is converted to a pattern
MAX_WRITTEN = 20_000  # maximum number of characters of such a pattern
STEPS_PER_COUNT = 16  # number of steps that count as one unit of work; see `Count`

Ranges = tuple[tuple[int, int], ...]  # code points, inclusive, ascending
Count = Callable[[Any], object]  # called for each unit of work; raises an error above a limit

EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_ANY = r"(?:.|[\n\r\u2028\u2029])"


class TooComplexError(Exception):
    """Raised if comparing patterns would take too much work."""


class Reading(NamedTuple):
    pattern: str
    is_wide: bool


def intersects(patterns: Iterable[str], count: Count) -> bool:
    """Whether some text may match all patterns. Raises `TooComplexError` if this is too much work to find out."""
    automaton = _automaton(tuple(Reading(pattern, True) for pattern in patterns), count)
    return any(all(matched) for matched in automaton.matched)


def complement(pattern: str, count: Count) -> str | None:
    """Return an ECMA-262 pattern for the texts that `pattern` does not match, or None if it matches all texts.

    Raises `TooComplexError` if this takes too much work.
    """
    return _written(_automaton((Reading(pattern, True),), count), lambda matched: not matched[0], count)


def partition(
    patterns: Sequence[str], count: Count, *, with_ambiguous: bool = True
) -> list[tuple[str, tuple[int, ...]]]:
    """Return pairs (ECMA-262 pattern, indices). The patterns are disjoint.

    The texts of a pair's pattern match exactly those of `patterns` that the pair's indices select. With
    `with_ambiguous`, the result includes a pattern without indices, for the texts on which ECMA-262 and Python differ.
    Raises `TooComplexError` if this takes too much work.
    """
    readings = [Reading(pattern, wide) for pattern in patterns for wide in (False, True)]
    automaton = _automaton(tuple(readings), count)
    kinds = dict.fromkeys(map(_agreed, automaton.matched))
    if not with_ambiguous:
        kinds.pop((), None)
    written = [
        (_written(automaton, lambda matched, this=kind: _agreed(matched) == this, count), kind)
        for kind in kinds
        if kind is not None
    ]
    return [(text, kind) for text, kind in written if text is not None]


def ambiguous(patterns: Iterable[str]) -> str | None:
    """Return an ECMA-262 pattern that matches all texts on which ECMA-262 and Python may differ.

    Such a text has a character that a class, for example `\\d`, matches in only one dialect. The result matches no text
    that one of `patterns` matches in both dialects. Returns "" if there are no such texts, and None if they cannot be
    described by such a simple pattern. Raises `TooComplexError` if this takes too much work.
    """
    told: set[tuple[int, int]] = set()
    known: set[tuple[int, int]] = set()
    for pattern in patterns:
        try:
            both = [*zip(rows(pattern, is_wide=False), rows(pattern, is_wide=True), strict=True)]
        except PatternError:
            return None
        for (at_start, row, at_end), (_, wide, _) in both:
            if not (at_start and at_end):
                return None
            told.add((10, 10))  # Python's `$` also matches before a final line break
            for one, other in zip(_texts(row), _texts(wide), strict=True):
                known.update(characters(one))
                told.update(_without(characters(other), characters(one)))
    found = _joined(told)
    letters = _joined(known)
    if _without(found, letters) != found:
        return None
    before = f"{_spelled(letters)}*" if letters else ""
    return f"^{before}{_spelled(found)}{_spelled(_joined((*found, *letters)))}*$" if found else ""


def _texts(row: Row) -> list[str]:
    """Return all characters and classes of a row, including those in nested groups."""
    found: list[str] = []
    pending: list[Node] = list(row)
    while pending:
        node = pending.pop()
        if isinstance(node, Text):
            found.append(node.regex)
        elif isinstance(node, Repeat):
            pending.append(node.item)
        elif isinstance(node, Either):
            pending += [item for branch in node.branches for item in branch]
    return found


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the characters of `ranges` that are not in `others`."""
    cuts = sorted({edge for low, high in (*ranges, *others) for edge in (low, high + 1)})
    return _joined((low, above - 1) for low, above in pairwise(cuts) if _holds(ranges, low) and not _holds(others, low))


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _agreed(matched: tuple[bool, ...]) -> tuple[int, ...] | None:
    """Return the indices of the matching patterns. `matched` has the narrow and the wide match of each pattern in turn.

    Returns () if the two readings of a pattern differ, and None if no pattern matches.
    """
    narrow, wide = matched[::2], matched[1::2]
    if narrow != wide:
        return ()
    return tuple(index for index, each in enumerate(narrow) if each) or None


def spelled(text: str) -> str:
    """Return an ECMA-262 pattern that matches exactly this text."""
    return "".join([_letter(ord(character)) for character in text])


# --- automata ---


class Automaton(NamedTuple):
    """A deterministic automaton. It starts in state 0."""

    classes: list[Ranges]
    next: list[list[int]]  # next[state][class] is the next state
    matched: list[tuple[bool, ...]]  # matched[state][i]: whether texts that end in this state match pattern i


class _Parts:
    """A nondeterministic automaton that is being built.

    `free[state]` lists the states that are reached without reading a character. `edges[state]` lists the characters of
    each transition and its target.
    """

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.edges: list[list[tuple[Ranges, int]]] = []

    def add(self) -> int:
        if len(self.edges) >= MAX_PARTS:
            raise TooComplexError
        self.free.append([])
        self.edges.append([])
        return len(self.edges) - 1

    def step(self, start: int, ranges: Ranges) -> int:
        end = self.add()
        self.edges[start].append((ranges, end))
        return end

    def row(self, start: int, row: Row) -> int:
        for node in row:
            start = self.node(start, node)
        return start

    def node(self, start: int, node: Node) -> int:
        if isinstance(node, Text):
            return self.step(start, characters(node.regex))
        if isinstance(node, Either):
            end = self.add()
            for row in node.branches:
                self.free[self.row(start, row)].append(end)
            return end
        if not isinstance(node, Repeat):
            raise TooComplexError
        for _ in range(node.low):
            start = self.node(start, node.item)
        end = self.add()
        self.free[start].append(end)
        if node.high is None:
            self.free[self.node(end, node.item)].append(end)
            return end
        for _ in range(node.high - node.low):
            start = self.node(start, node.item)
            self.free[start].append(end)
        return end

    def pattern(self, reading: Reading) -> tuple[int, int]:
        """Add a pattern. Return its start state and its accepting state."""
        first, last = self.add(), self.add()
        for at_start, row, at_end in rows(reading.pattern, is_wide=reading.is_wide):
            begin = self.add()
            self.free[first].append(begin)
            if not at_start:
                self.edges[begin].append((EVERY, begin))
            end = self.row(begin, row)
            if not at_end:
                tail = self.add()
                self.free[end].append(tail)
                self.edges[tail].append((EVERY, tail))
                end = tail
            elif reading.is_wide:  # Python's `$` also matches before a final line break
                self.free[self.step(end, ((10, 10),))].append(last)
            self.free[end].append(last)
        return first, last

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return the given states and all states that are reachable from them without reading a character."""
        found, pending = set[int](), list(states)
        while pending:
            state = pending.pop()
            if state not in found:
                found.add(state)
                pending += self.free[state]
        return frozenset(found)


def exact_automaton(pattern: str) -> Automaton:
    """Return the automaton of the texts that a pattern matches as a whole. The pattern must have no anchors.

    Raises `TooComplexError` if the automaton would be too large.
    """
    found, _ = _cached((Reading(f"^(?:{pattern})$", False),))
    if found is None:
        raise TooComplexError
    return found


def _automaton(readings: tuple[Reading, ...], count: Count) -> Automaton:
    found, steps = _cached(readings)
    for _ in range(steps // STEPS_PER_COUNT):
        count(None)
    if found is None:
        raise TooComplexError
    return found


@lru_cache(64)
def _cached(readings: tuple[Reading, ...]) -> tuple[Automaton | None, int]:
    """Return (automaton of all patterns, or None if it would be too large; number of steps taken)."""
    parts = _Parts()
    try:
        if sum(len(each.pattern) for each in readings) > MAX_LETTERS:
            return None, 0
        ends = [parts.pattern(each) for each in readings]
    except (TooComplexError, PatternError):
        return None, len(parts.edges)
    classes, indices = _classes({ranges for edges in parts.edges for ranges, _ in edges})
    leads = [
        [(indices[ranges], parts.closure([end])) for ranges, end in edges] if edges else [] for edges in parts.edges
    ]
    states = {parts.closure(first for first, _ in ends): 0}
    next_: list[list[int]] = []
    steps = len(parts.edges)
    for state in (pending := [*states]):
        targets: list[set[int]] = [set() for _ in classes]
        for part in state:
            for reached, beyond in leads[part]:
                steps += len(reached)
                for index in reached:
                    targets[index] |= beyond
        if steps > MAX_STEPS:
            return None, steps
        line: list[int] = []
        for target in map(frozenset, targets):
            if target not in states:
                if len(states) >= MAX_STATES:
                    return None, steps
                states[target] = len(states)
                pending.append(target)
            line.append(states[target])
        next_.append(line)
    matched = [tuple(last in state for _, last in ends) for state in states]
    return Automaton(classes, next_, matched), steps


def _classes(every: set[Ranges]) -> tuple[list[Ranges], dict[Ranges, list[int]]]:
    """Divide all characters into classes. No pattern distinguishes two characters of one class.

    Return the classes, and for each set of ranges in `every` the indices of its classes.
    """
    cuts = {0, 0xD800, 0xE000, 0x110000}
    for ranges in every:
        cuts.update(edge for low, high in ranges for edge in (low, high + 1))
    alike: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    sets = list(every)
    for low, above in pairwise(sorted(cuts)):
        if 0xD800 <= low < 0xE000:
            continue
        key = tuple(_holds(ranges, low) for ranges in sets)
        alike.setdefault(key, []).append((low, above - 1))
    indices = {ranges: [at for at, key in enumerate(alike) if key[number]] for number, ranges in enumerate(sets)}
    return [tuple(ranges) for ranges in alike.values()], indices


# --- characters in llguidance's syntax ---


@lru_cache(512)
def characters(regex: str) -> Ranges:
    """Return the characters that a character or class in llguidance's syntax matches.

    Raises `TooComplexError` for example if the class has a Unicode property.
    """
    ranges, end = _class(regex, 1) if regex[0] == "[" else ([_one(regex, 0)[0]], len(regex))
    if end != len(regex):
        raise TooComplexError
    return _joined([(each, each) if isinstance(each, int) else each for each in ranges])


def _class(regex: str, at: int) -> tuple[list[tuple[int, int] | int], int]:
    """Return the ranges of the class whose opening bracket is at `at` - 1, and the index after the class."""
    negated = regex[at] == "^"
    at += negated
    found: list[tuple[int, int] | int] = []
    while regex[at] != "]":
        if regex[at] == "[":
            inner, at = _class(regex, at + 1)
            found += inner
            continue
        low, at = _one(regex, at)
        high = low
        if regex[at] == "-":
            high, at = _one(regex, at + 1)
        found.append((low, high))
    if not negated:
        return found, at + 1
    left: list[tuple[int, int] | int] = []
    begin = 0
    for low, high in _joined([each for each in found if isinstance(each, tuple)]):
        if begin < low:
            left.append((begin, low - 1))
        begin = high + 1
    return [*left, (begin, 0x10FFFF)] if begin <= 0x10FFFF else left, at + 1


def _one(regex: str, at: int) -> tuple[int, int]:
    """Return the code point of the character that is written at `at`, and the index after it."""
    if regex[at] != "\\":
        return ord(regex[at]), at + 1
    kind = regex[at + 1]
    if kind in "tnr":
        return {"t": 9, "n": 10, "r": 13}[kind], at + 2
    if kind != "x":
        raise TooComplexError  # a Unicode property, such as \p{L}
    if regex[at + 2] == "{":
        end = regex.index("}", at)
        return int(regex[at + 3 : end], 16), end + 1
    return int(regex[at + 2 : at + 4], 16), at + 4


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


# --- back to patterns ---


def _written(of: Automaton, wanted: Callable[[tuple[bool, ...]], bool], count: Count) -> str | None:
    """Return a pattern for the texts that end in a wanted state, or None if there are none.

    The states are eliminated one by one: the paths through a state become expressions between its neighbours. Raises
    `TooComplexError` if this takes too much work.
    """
    ends = _minimized(of, [wanted(matched) for matched in of.matched], count)
    start, end = -1, -2
    edges: dict[int, dict[int, str]] = {start: {ends[0]: ""}}
    for state, name in enumerate(ends):
        if name in edges:
            continue
        by_target: dict[int, list[tuple[int, int]]] = {}
        for ranges, target in zip(of.classes, of.next[state], strict=True):
            by_target.setdefault(ends[target], []).extend(ranges)
        found = {target: _spelled(_joined(ranges)) for target, ranges in by_target.items()}
        edges[name] = {target: text for target, text in found.items() if text}
        if wanted(of.matched[state]):
            edges[name][end] = ""
    _drop_dead(edges, end)
    if len(edges) > MAX_WRITTEN_STATES:
        raise TooComplexError
    while len(edges) > 1:
        for _ in range(1 + len(edges) // 32):
            count(None)
        sources: dict[int, list[int]] = {name: [] for name in edges}
        for name, targets in edges.items():
            for target in targets:
                if target != end and target != name:
                    sources[target].append(name)
        name = min((each for each in edges if each != start), key=lambda each: _growth(each, sources[each], edges))
        beyond = edges.pop(name)
        loop = beyond.pop(name, None)
        again = "" if not loop else f"{_one_item(loop)}*"
        for source in sources[name]:
            before = edges[source].pop(name)
            for target, text in beyond.items():
                count(None)
                way = _in_row(before) + again + _in_row(text)
                other = edges[source].get(target)
                edges[source][target] = way if other is None else f"{other}|{way}"
        if sum(len(text) for targets in edges.values() for text in targets.values()) > MAX_WRITTEN:
            raise TooComplexError
    text = edges[start].get(end)
    return None if text is None else f"^(?:{text})$"


def _growth(name: int, sources: Sequence[int], edges: Mapping[int, Mapping[int, str]]) -> int:
    """Return the approximate growth of the expressions, in characters, if this state is eliminated."""
    after = [len(text) + 2 for target, text in edges[name].items() if target != name]
    before = [len(edges[source][name]) + 2 for source in sources]
    loop = len(edges[name].get(name, ""))
    return sum(before) * (len(after) - 1) + sum(after) * (len(before) - 1) + loop * (len(before) * len(after) - 1)


def _minimized(of: Automaton, ends: Sequence[bool], count: Count) -> list[int]:
    """Return the number of each state's equivalence class (Moore's minimization)."""
    names, number = [int(each) for each in ends], 0
    while len(set(names)) != number:
        number = len(set(names))
        for _ in range(len(names) * len(of.classes) // STEPS_PER_COUNT):
            count(None)
        seen: dict[tuple[int, ...], int] = {}
        names = [
            seen.setdefault((name, *(names[target] for target in line)), len(seen))
            for name, line in zip(names, of.next, strict=True)
        ]
    return names


def _drop_dead(edges: dict[int, dict[int, str]], end: int) -> None:
    """Remove states from which `end` is not reachable."""
    live = {end}
    while more := [name for name, targets in edges.items() if name not in live and not live.isdisjoint(targets)]:
        live.update(more)
    for name in [name for name in edges if name not in live and name >= 0]:
        del edges[name]
    for name, targets in edges.items():
        edges[name] = {target: text for target, text in targets.items() if target in live}


def _spelled(ranges: Ranges) -> str:
    """Return a class with these characters, without control characters that have no short JSON escape."""
    if ranges == EVERY:
        return _ANY
    letters = [(code, code) for code in (8, 9, 10, 12, 13) if _holds(ranges, code)]
    ranges = (*letters, *((max(low, 32), high) for low, high in ranges if high >= 32))
    inner = "".join(_letter(low) + ("" if low == high else f"-{_letter(high)}") for low, high in ranges)
    return f"[{inner}]" if inner else ""


def _letter(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{{{code:x}}}"


def _in_row(text: str) -> str:
    return f"(?:{text})" if _has_choice(text) else text


def _one_item(text: str) -> str:
    is_class = text.startswith("[") and text.find("]") == len(text) - 1
    return text if is_class or text == _ANY else f"(?:{text})"


def _has_choice(text: str) -> bool:
    """Whether the text has a `|` outside groups."""
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and not depth:
            return True
    return False
