"""What rendering a chat template may cost: processor time, and bytes of what it makes.

A template comes with a checkpoint, but what it loops over and writes comes from clients. Every loop, call, filter and
operator that can make something large is metered: what it would make is estimated before, and billed after.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from time import thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine refuses nothing
MAX_BYTES = 64 * 1024 * 1024  # of all that is made, even if it is dropped again
STEP_BYTES = 64  # billed for each step, which may make small things
CLOCK_STEPS = 16  # between looks at the clock
MAX_WIDTH = 1_000_000  # of padding
MAX_DIGITS = 400  # of rounding
LITERAL_PARTS = 8  # of a list or dictionary; larger ones are billed

_METER: ContextVar[Meter] = ContextVar("penstock_template_meter")
_PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z]*?(\d+)(?:\.(\d+))?")
_FORMAT_WIDTH = re.compile(r"[:.][^{}:]*?(\d+)(?:\.(\d+))?")
_BIG_TYPES = (str, bytes, int, list, tuple, dict, set)


class TemplateLimit(Exception):
    """Rendering took too long or made too much."""


class Meter:
    """What is left of a rendering's time and bytes. Used by one thread."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self._deadline = thread_time() + seconds
        self._bytes_left = max_bytes
        self._steps = 0

    def bill(self, num_bytes: int = 0) -> None:
        """One step, with so many bytes made. Raises `TemplateLimit`."""
        self._bytes_left -= num_bytes + STEP_BYTES
        if self._bytes_left < 0:
            raise TemplateLimit("memory")
        self._steps += 1
        if self._steps % CLOCK_STEPS == 0 and thread_time() > self._deadline:
            raise TemplateLimit("time")

    def afford(self, num_bytes: float) -> None:
        """Raise `TemplateLimit` where so many bytes are not left; bills nothing."""
        if num_bytes > self._bytes_left:
            raise TemplateLimit("memory")

    def walk(self, value: Any) -> None:
        """Bill every part of a value whose text is wanted: shared parts count each time, as they do in the text."""
        if isinstance(value, str | int | float | None):
            return
        rest = [value]
        while rest:
            self.bill()
            part = rest.pop()
            if isinstance(part, Namespace):
                part = part._Namespace__attrs  # type: ignore[attr-defined]
            if isinstance(part, dict):
                rest.extend(part.keys())
                rest.extend(part.values())
            elif isinstance(part, list | tuple | set | frozenset):
                rest.extend(part)


@contextmanager
def metered(seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Render within these limits."""
    token = _METER.set(Meter(seconds, max_bytes))
    try:
        yield
    finally:
        _METER.reset(token)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose templates render only inside `metered` and raise `TemplateLimit` beyond it."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_finalize)
        self.globals.pop("lipsum", None)
        self.filters.update({name: _metered_filter(name, call) for name, call in self.filters.items()})
        self.filters.update(_INNER)

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """One more filter, metered like the others."""
        self.filters[name] = _metered_filter(name, call)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _Rewriter().visit(source)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        if operator == "*":
            meter.afford(_product(left, right))
        elif operator == "**":
            meter.afford(_power(left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left, right)
            meter.walk(right)
        elif operator == "+":
            meter.afford(_size(left) + _size(right))
        result = super().call_binop(context, operator, left, right)
        meter.bill(_size(result))
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = _METER.get()
        meter.bill()
        method = getattr(__obj, "__wrapped__", __obj)  # formatting comes wrapped
        owner = getattr(method, "__self__", None)
        estimate = _METHODS.get(getattr(method, "__name__", "")) if isinstance(owner, _BIG_TYPES) else None
        if estimate is not None:
            for value in args:
                meter.walk(value)
            meter.afford(estimate(owner, *args, **kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        meter.bill(_size(result))
        return result


# --- what a template is rewritten to ---


class _Rewriter(NodeTransformer):
    """Put the meter where jinja offers no hook: loops, `~`, slices, comparisons and large literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's names
        constant = sum(len(data.data) for body in node.body for data in body.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "*each", nodes.Const(constant))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filtered(parts, "*joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "*billed") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for side in [node, *node.ops[:-1]]:  # a comparison goes no deeper than its smaller side
            if not isinstance(side.expr, nodes.Const):
                side.expr = _filtered(side.expr, "*walked")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        num_parts = sum(1 for _ in node.find_all(nodes.Expr))
        self.generic_visit(node)
        large = num_parts > LITERAL_PARTS
        return _filtered(node, "*made", nodes.Const(num_parts * STEP_BYTES)) if large else node


def _filtered(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(node, name, list(args), [], None, None)
    made.set_lineno(node.lineno).set_environment(node.environment)
    return made


class _Each:
    """A loop's values, each billed with the template's own text in the loop."""

    def __init__(self, values: Any, num_constant: int) -> None:
        self._values, self._num_constant = values, num_constant

    def __iter__(self) -> Iterator[Any]:
        bill = _METER.get().bill
        for value in self._values:
            bill(self._num_constant)
            yield value


class _Sized(_Each):
    def __len__(self) -> int:
        return len(self._values)


def _each(values: Any, num_constant: int) -> _Each:
    return (_Sized if hasattr(values, "__len__") else _Each)(values, num_constant)


def _joined(parts: list[Any]) -> str:
    meter = _METER.get()
    for part in parts:
        meter.walk(part)
    meter.afford(sum(map(_size, parts)))
    text = "".join(map(str, parts))
    meter.bill(_size(text))
    return text


def _billed(value: Any) -> Any:
    _METER.get().bill(_size(value))
    return value


def _walked(value: Any) -> Any:
    if not isinstance(value, str):
        _METER.get().walk(value)
    return value


def _made(value: Any, num_bytes: int) -> Any:
    _METER.get().bill(num_bytes)
    return value


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Every value that a template writes. Takes the context so that nothing is written while it is compiled."""
    meter = _METER.get()
    meter.walk(value)
    text = value if isinstance(value, str) else str(value)
    meter.bill(_size(text))
    return text


_INNER = {"*each": _each, "*joined": _joined, "*billed": _billed, "*walked": _walked, "*made": _made}


# --- filters and methods that make much of little; arguments may be named, so their names are jinja's and Python's ---


def _metered_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    estimate, walks = _FILTERS.get(name), name in _OF_TEXT
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        if walks:
            for value in args[first:]:
                meter.walk(value)
        if estimate is not None:
            meter.afford(estimate(*args[first:], **kwargs))
        result = call(*args, **kwargs)
        meter.bill(_size(result))
        return result

    return filtered


def _size(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, _BIG_TYPES) else 0


def _text_size(value: Any) -> int:
    return _size(value if isinstance(value, str | bytes) else str(value))


def _product(left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        return min(left.bit_length(), right.bit_length()) ** 2  # not its bytes, but about its time
    if isinstance(left, int):
        left, right = right, left
    return float(_size(left)) * max(right, 0) if isinstance(right, int) else 0


def _power(left: Any, right: Any) -> float:
    whole = isinstance(left, int) and isinstance(right, int)
    return float(left.bit_length() * max(right, 0)) ** 2 if whole else 0


def _check_format(pattern: str | bytes, values: Any) -> None:
    """Refuse widths and precisions of `%` that fill memory."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    parts = values if isinstance(values, tuple) else (values,)
    starred = "*" in text and any(isinstance(part, int) and part > MAX_WIDTH for part in parts)
    if starred or _widths(_PERCENT_WIDTH, text) > MAX_WIDTH:
        raise TemplateLimit("memory")


def _widths(form: re.Pattern[str], text: str) -> float:
    """The sum of the numbers in a format."""
    return sum(float(number) for found in form.findall(text) for number in found if number)


def _width(_: Any, width: Any = 80, *rest: Any, **more: Any) -> float:
    return _too_much(width, MAX_WIDTH)


def _too_much(value: Any, limit: int) -> float:
    return float("inf") if isinstance(value, int | float) and abs(value) > limit else 0.0


def _rounding(_: Any, precision: Any = 0, method: Any = "common") -> float:
    return _too_much(precision, MAX_DIGITS)


def _replacing(text: Any, old: Any, new: Any, count: Any = None) -> float:
    text, old, new = (value if isinstance(value, str | bytes) else str(value) for value in (text, old, new))
    return float(_size(text)) + float(text.count(old)) * _size(new)  # type: ignore[arg-type]


def _splitting(text: Any, *separator: Any, **more: Any) -> float:
    named = more.get("sep", separator[0] if separator else None)
    pieces = text.count(named) if isinstance(named, type(text)) and named else len(text) // 2
    return 64.0 * pieces + _size(text)


def _joining(separator: Any, values: Any = (), *rest: Any, **more: Any) -> float:
    num = len(values) if hasattr(values, "__len__") else MAX_WIDTH // 10
    return float(num) * len(separator) if isinstance(separator, str | bytes) else 0


def _filter_joining(values: Any, d: Any = "", attribute: Any = None) -> float:
    many = isinstance(values, Iterable) and hasattr(values, "__len__")
    num = len(values) if many else MAX_WIDTH // 10  # type: ignore[arg-type]
    return float(num) * _text_size(d)


def _indenting(text: Any, width: Any = 4, *rest: Any, **more: Any) -> float:
    step = width if isinstance(width, int) else len(str(width))
    return float(str(text).count("\n") + 1) * step


def _wrapping(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *rest: Any, **more: Any
) -> float:
    return float(len(str(text))) * (1 + len(str(wrapstring or "")))


def _pieces(
    values: Any, num: Any = 1, fill_with: Any = None, *, linecount: Any = None, slices: Any = None
) -> float:
    num = linecount or slices or num
    size = len(values) if hasattr(values, "__len__") else MAX_WIDTH // 10
    return 64.0 * size + _too_much(num, MAX_WIDTH // 10) + 8.0 * (num if isinstance(num, int) else 0)


def _listing(values: Any) -> float:
    return 40.0 * len(values) if hasattr(values, "__len__") else 0.0


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> float:
    step = indent if isinstance(indent, int) else len(str(indent or ""))
    between = sum(len(str(each)) for each in separators or ())
    return _depths(value) * step + between * _depths(value) if step or between > 8 else 0.0


def _depths(value: Any) -> float:
    """The sum of how deep every part of a value lies: what indenting them takes."""
    total, rest = 0.0, [(value, 1)]
    while rest:
        part, depth = rest.pop()
        total += depth
        if isinstance(part, dict):
            rest.extend((each, depth + 1) for each in part.values())
        elif isinstance(part, list | tuple):
            rest.extend((each, depth + 1) for each in part)
    return total


def _summing(values: Any, attribute: Any = None, start: Any = 0) -> float:
    return 0.0 if isinstance(start, int | float) else float("inf")  # adding up lists is quadratic


def _expanding(text: Any, tabsize: Any = 8) -> float:
    tabs = text.count("\t" if isinstance(text, str) else b"\t")
    return float(tabs) * max(tabsize, 0) + _too_much(tabsize, MAX_WIDTH)


def _to_bytes(_: Any, length: Any = 1, *rest: Any, **more: Any) -> float:
    return _width(_, length)


def _translating(text: Any, table: Any, *rest: Any) -> float:
    longest = max((_size(value) for value in table.values()), default=0) if isinstance(table, dict) else 8
    return float(len(text)) * longest


def _formatting(pattern: Any, *args: Any, **more: Any) -> float:
    """`str.format`: a width may also come from an argument."""
    values = (*args, *more.values())
    wide = any(isinstance(value, int) and value > MAX_WIDTH for value in values)
    nested = re.search(r"\{[^{}]*\{", pattern) is not None
    too_wide = _widths(_FORMAT_WIDTH, pattern) > MAX_WIDTH or (wide and nested)
    return float("inf") if too_wide else 0.0


def _percent(pattern: Any, *args: Any, **more: Any) -> float:
    _check_format(str(pattern), args or tuple(more.values()))
    return 0.0


_OF_TEXT = frozenset(  # filters that read every part of what they are given
    (
        *("string", "join", "tojson", "pprint", "format", "replace", "upper", "lower", "title", "capitalize"),
        *(
            "trim",
            "center",
            "indent",
            "escape",
            "e",
            "forceescape",
            "safe",
            "urlencode",
            "urlize",
            "wordcount",
        ),
        *(
            "striptags",
            "truncate",
            "wordwrap",
            "xmlattr",
            "unique",
            "sort",
            "min",
            "max",
            "groupby",
            "dictsort",
        ),
    )
)
_FILTERS: dict[str, Callable[..., float]] = {
    "batch": _pieces,
    "center": _width,
    "format": _percent,
    "indent": _indenting,
    "join": _filter_joining,
    "list": _listing,
    "pprint": _depths,
    "replace": _replacing,
    "round": _rounding,
    "slice": _pieces,
    "sum": _summing,
    "tojson": _to_json,
    "wordwrap": _wrapping,
}
_METHODS: dict[str, Callable[..., float]] = {
    "center": _width,
    "expandtabs": _expanding,
    "format": _formatting,
    "format_map": _formatting,
    "join": _joining,
    "ljust": _width,
    "replace": _replacing,
    "rjust": _width,
    "rsplit": _splitting,
    "split": _splitting,
    "splitlines": _splitting,
    "to_bytes": _to_bytes,
    "translate": _translating,
    "zfill": _width,
}
