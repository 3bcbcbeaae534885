"""A measured figure with its limit, and the table of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.gpu.limits import Limits
from serve.bench.report import text_of

NONE = "-"


class Figure(NamedTuple):
    """One line of the table. `limit` has the unit of `value`: a lower limit for times, an upper limit for rates."""

    what: str
    model: str
    value: float
    unit: str
    limit: float | None = None
    bound: str = ""  # the resource that determines the limit: "bytes" or "operations"
    lower_is_better: bool = False

    @property
    def share(self) -> float | None:
        """How close the value is to the limit: 1 means that it is reached."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.lower_is_better else self.value / self.limit


class Failure(NamedTuple):
    """A row that could not be measured."""

    what: str
    why: str


HEAD = ("| what | model | measured | limit | of the limit | limited by |", "|---|---|---|---|---|---|")


def line_of(row: Figure | Failure) -> str:
    """Return one line of the table."""
    if isinstance(row, Failure):
        return f"| {row.what} | {NONE} | not measured: {' '.join(row.why.split())} | | | |"
    limit = NONE if row.limit is None else f"{text_of(float(row.limit))} {row.unit}"
    share = NONE if row.share is None else f"{row.share:.0%}"
    value = f"{text_of(float(row.value))} {row.unit}"
    return f"| {row.what} | {row.model} | {value} | {limit} | {share} | {row.bound or NONE} |"


def limit_lines(limits: Limits) -> list[str]:
    """Return the table of the device's own limits."""
    return [
        "| what the device does | measured |",
        "|---|---|",
        f"| copies, bytes read and written | {limits.copied_bytes_per_s / 1e9:,.1f} GB/s |",
        f"| sums, bytes read | {limits.summed_bytes_per_s / 1e9:,.1f} GB/s |",
        f"| multiplies square {limits.dtype} matrices | {limits.operations_per_s / 1e12:,.2f} TFLOP/s |",
    ]


def heading(content: Mapping[str, Any], device: str) -> str:
    """Return the first paragraph of a result document: place, time and versions."""
    machine, versions = content["machine"], content["versions"]
    names = ("python", "torch", "triton", "flashinfer-python", "uvloop")
    with_what = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    where = ", ".join(machine["gpus"]) if device != "cpu" else f"CPU ({machine['cpu']})"
    text = f"`{content['command']}`, {content['date'][:10]}, {where}, {with_what}."
    if device == "cpu":
        text += " **A CPU: these figures try the command and say nothing about a GPU.**"
    return text


def document_of(rows: Iterable[Figure | Failure]) -> list[dict[str, Any]]:
    """Return the rows for the result file."""
    return [{**row._asdict(), "share": row.share} if isinstance(row, Figure) else row._asdict() for row in rows]
