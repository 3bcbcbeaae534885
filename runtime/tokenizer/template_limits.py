"""What rendering a chat template may cost: processor time, and bytes of what it makes.

A template comes with a checkpoint, but what it loops over and writes comes from clients. Every loop, call, filter and
operator that can make something large is metered: what it would make is estimated before, and billed after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from runtime.tokenizer.template_costs import (
    BIG_TYPES,
    FILTER_COSTS,
    METHOD_COSTS,
    OF_TEXT,
    TemplateLimit,
    check_format,
    power_cost,
    product_cost,
    size_of,
)

MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine refuses nothing
MAX_BYTES = 64 * 1024 * 1024  # of all that is made, even if it is dropped again
STEP_BYTES = 64  # billed for each step, which may make small things
CLOCK_STEPS = 16  # between looks at the clock
LITERAL_PARTS = 8  # of a list or dictionary; larger ones are billed

_METER: ContextVar[Meter] = ContextVar("penstock_template_meter")


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
def metered(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Render within this time, and within `MAX_BYTES`."""
    token = _METER.set(Meter(seconds, MAX_BYTES))
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
            meter.afford(product_cost(left, right))
        elif operator == "**":
            meter.afford(power_cost(left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            check_format(left, right)
            meter.walk(right)
        elif operator == "+":
            meter.afford(size_of(left) + size_of(right))
        result = super().call_binop(context, operator, left, right)
        meter.bill(size_of(result))
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = _METER.get()
        meter.bill()
        method = getattr(__obj, "__wrapped__", __obj)  # formatting comes wrapped
        owner = getattr(method, "__self__", None)
        estimate = METHOD_COSTS.get(getattr(method, "__name__", "")) if isinstance(owner, BIG_TYPES) else None
        if estimate is not None:
            for value in args:
                meter.walk(value)
            named = {name: value for name, value in kwargs.items() if name not in _SCOPES}
            meter.afford(estimate(owner, *args, **named))
        result = super().call(__context, __obj, *args, **kwargs)
        meter.bill(size_of(result))
        return result


_SCOPES = ("_loop_vars", "_block_vars")  # that jinja gives every call where a loop or block has variables

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
    meter.afford(sum(map(size_of, parts)))
    text = "".join(map(str, parts))
    meter.bill(size_of(text))
    return text


def _billed(value: Any) -> Any:
    _METER.get().bill(size_of(value))
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
    meter.bill(size_of(text))
    return text


_INNER = {"*each": _each, "*joined": _joined, "*billed": _billed, "*walked": _walked, "*made": _made}


# --- filters and methods that make much of little; arguments may be named, so their names are jinja's and Python's ---


def _metered_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    estimate, walks = FILTER_COSTS.get(name), name in OF_TEXT
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
        meter.bill(size_of(result))
        return result

    return filtered
