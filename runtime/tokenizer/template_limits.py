"""Limit the processor time and the memory of rendering a chat template.

A template comes with a checkpoint, but clients choose the data that it loops over and writes. Therefore every loop,
call, filter and operator that can create a large value is metered: before it runs, the size of its result is estimated;
after it has run, the size of its result is subtracted ("billed") from the remaining bytes.
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

MAX_SECONDS = 1.0  # limit on the thread's processor time; on a busy machine, less of it passes than wall-clock time
MAX_BYTES = 64 * 1024 * 1024  # limit on the total size of all values that rendering creates, including freed ones
STEP_BYTES = 64  # billed for every step, in addition to the size of its value
CLOCK_STEPS = 16  # number of steps between two reads of the clock
LITERAL_PARTS = 8  # literal lists and dictionaries with more parts are billed

_METER: ContextVar[Meter] = ContextVar("penstock_template_meter")


class Meter:
    """The remaining time and bytes of one rendering. Not thread-safe."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self._deadline = thread_time() + seconds
        self._bytes_left = max_bytes
        self._steps = 0

    def bill(self, num_bytes: int = 0) -> None:
        """Count one step that has created `num_bytes`. Raises `TemplateLimit` if a limit is exceeded."""
        self._bytes_left -= num_bytes + STEP_BYTES
        if self._bytes_left < 0:
            raise TemplateLimit("memory")
        self._steps += 1
        if self._steps % CLOCK_STEPS == 0 and thread_time() > self._deadline:
            raise TemplateLimit("time")

    def afford(self, num_bytes: float) -> None:
        """Raise `TemplateLimit` if fewer than `num_bytes` are left. The bytes are not billed."""
        if num_bytes > self._bytes_left:
            raise TemplateLimit("memory")

    def walk(self, value: Any) -> None:
        """Bill one step for every nested part of a value that is about to be read.

        A part that occurs several times is billed each time.
        """
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
    """Limit rendering in the `with` block to `seconds` of processor time and to `MAX_BYTES`."""
    token = _METER.set(Meter(seconds, MAX_BYTES))
    try:
        yield
    finally:
        _METER.reset(token)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which counts the time and memory of rendering.

    Render templates only inside `metered`. Rendering raises `TemplateLimit` when a limit of `metered` is exceeded.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_finalize)
        self.globals.pop("lipsum", None)
        self.filters.update({name: _metered_filter(name, call) for name, call in self.filters.items()})
        self.filters.update(_INNER)

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """Add a metered filter."""
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
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps `str.format`
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


_SCOPES = ("_loop_vars", "_block_vars")  # jinja passes these to every call in a loop or block with variables

# --- rewriting a template ---


class _Rewriter(NodeTransformer):
    """Adds the meter where jinja has no hook: loops, `~`, slices, comparisons and large literals."""

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
        # A comparison visits no more parts than its smaller side has, so it is enough to meter one side.
        for side in [node, *node.ops[:-1]]:
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
        return _filtered(node, "*literal", nodes.Const(num_parts * STEP_BYTES)) if large else node


def _filtered(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    filtered = nodes.Filter(node, name, list(args), [], None, None)
    filtered.set_lineno(node.lineno).set_environment(node.environment)
    return filtered


class _Each:
    """The values of a loop. Each iteration bills the length of the constant text in the loop's body."""

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


def _literal(value: Any, num_bytes: int) -> Any:
    _METER.get().bill(num_bytes)
    return value


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Bill a value that a template writes, and return it as text.

    The parameter `context` is not used. Its only purpose is that jinja does not call the function at compile time.
    """
    meter = _METER.get()
    meter.walk(value)
    text = value if isinstance(value, str) else str(value)
    meter.bill(size_of(text))
    return text


_INNER = {"*each": _each, "*joined": _joined, "*billed": _billed, "*walked": _walked, "*literal": _literal}


# --- filters ---


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
