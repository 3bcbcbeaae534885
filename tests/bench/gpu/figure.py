"""A measured figure beside its limit, and the table that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.gpu.limits import Limits
from serve.bench.report import text_of

NONE = "-"


class Figure(NamedTuple):
    """One line. `limit` is in the unit of `value`; a time can only be longer than it, a rate only lower."""

    what: str
    model: str
    value: float
    unit: str
    limit: float | None = None
    bound: str = ""  # what the limit is made of: "bytes", "operations"
    lower_is_better: bool = False

    @property
    def share(self) -> float | None:
        """How near the limit it is: 1 is there."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.lower_is_better else self.value / self.limit


class Failure(NamedTuple):
    """A row that could not be measured."""

    what: str
    why: str


HEAD = ("| what | model | measured | limit | of the limit | limited by |", "|---|---|---|---|---|---|")


def line_of(row: Figure | Failure) -> str:
    """One line of the table."""
    if isinstance(row, Failure):
        return f"| {row.what} | {NONE} | not measured: {' '.join(row.why.split())} | | | |"
    limit = NONE if row.limit is None else f"{text_of(float(row.limit))} {row.unit}"
    share = NONE if row.share is None else f"{row.share:.0%}"
    value = f"{text_of(float(row.value))} {row.unit}"
    return f"| {row.what} | {row.model} | {value} | {limit} | {share} | {row.bound or NONE} |"


def limit_lines(limits: Limits) -> list[str]:
    """The table of what the device itself can do."""
    return [
        "| what the device does | measured |",
        "|---|---|",
        f"| copies, bytes read and written | {limits.copied_bytes_per_s / 1e9:,.1f} GB/s |",
        f"| sums, bytes read | {limits.summed_bytes_per_s / 1e9:,.1f} GB/s |",
        f"| multiplies square {limits.dtype} matrices | {limits.operations_per_s / 1e12:,.2f} TFLOP/s |",
    ]


def heading(content: Mapping[str, Any], device: str) -> str:
    """Where, when and with what: the first paragraph, from a result document."""
    machine, versions = content["machine"], content["versions"]
    names = ("python", "torch", "triton", "flashinfer-python", "uvloop")
    with_what = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    where = ", ".join(machine["gpus"]) if device != "cpu" else f"CPU ({machine['cpu']})"
    text = f"`{content['command']}`, {content['date'][:10]}, {where}, {with_what}."
    if device == "cpu":
        text += " **A CPU: these figures try the command and say nothing about a GPU.**"
    return text


def document_of(rows: Iterable[Figure | Failure]) -> list[dict[str, Any]]:
    """The rows for the result file."""
    return [
        {**row._asdict(), "share": row.share} if isinstance(row, Figure) else row._asdict() for row in rows
    ]
