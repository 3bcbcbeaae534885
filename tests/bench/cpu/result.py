"""A result: measurements with their machine and time, possibly joined from several files, and their text form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import PROGRAM
from bench.checkpoints import SHAPES
from bench.cpu.compare import by_figure, compare, disturbed, streamed_share, table
from bench.cpu.limits import Cost, Limits
from bench.cpu.turns import Failure, Turn
from bench.cpu.work import FIGURES, GOALS_OF_4_BITS
from runtime.errors import ConfigurationError
from serve.bench import report

ROUNDS_OF_A_FILE = 1000  # more than the maximum number of rounds
STREAMED_GOAL = 0.9
TINY = "T"


class Part(NamedTuple):
    """Measurements of one shape with one kind of weights."""

    shape: str
    weights: str
    turns: Sequence[Turn]
    failures: Sequence[Failure]
    versions: Mapping[str, Mapping[str, str]]


class Sitting(NamedTuple):
    """Time, place and method of a measurement."""

    date: str
    machine: str
    command: str


class Result(NamedTuple):
    """All data for the tables."""

    limits: Limits
    parts: Sequence[Part]
    sittings: Sequence[Sitting]


def sitting(argv: Sequence[str]) -> Sitting:
    """Return the description of the current measurement."""
    about = report.document("cpu", {}, {}, argv=argv, program=PROGRAM)
    machine = about["machine"]
    flags = " ".join(machine["cpu_flags"])
    return Sitting(about["date"], f"{machine['cpu']}, {machine['cores']} cores, {flags}", about["command"])


def join(files: Sequence[str]) -> Result:
    """Join earlier results: turns of the same part together, and the best limits of all files.

    Rounds of different files follow one another. Raises `ConfigurationError` for an invalid result file.
    """
    limits: list[Limits] = []
    sittings: list[Sitting] = []
    parts: dict[tuple[str, str], Part] = {}
    for number, file in enumerate(files):
        found = _read(file)
        limits.append(Limits(**found["limits"]))
        sittings += (Sitting(**one) for one in found["sittings"])
        for content in found["parts"]:
            part = _part(content, number * ROUNDS_OF_A_FILE)
            key = (part.shape, part.weights)
            parts[key] = _together(parts[key], part) if key in parts else part
    return Result(Limits(*map(max, zip(*limits))), list(parts.values()), list(dict.fromkeys(sittings)))


def _read(file: str) -> Any:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("benchmark") != "cpu":
        raise ConfigurationError(f"{file} is not a result of this benchmark.")
    return content["results"]


def _part(content: Mapping[str, Any], first_round: int) -> Part:
    turns = [Turn(**turn) for turn in content["turns"]]
    return Part(
        content["shape"],
        content["weights"],
        [turn._replace(round=turn.round + first_round) for turn in turns],
        [Failure(**failure) for failure in content["failures"]],
        content["versions"],
    )


def _together(one: Part, other: Part) -> Part:
    return one._replace(
        turns=[*one.turns, *other.turns],
        failures=list(dict.fromkeys([*one.failures, *other.failures])),
        versions={**one.versions, **other.versions},
    )


def render(result: Result) -> str:
    """Return Markdown: the measurement's description, then a table for each part."""
    limits = result.limits
    lines = [f"Measured {one.date[:10]} on {one.machine}: `{one.command}`" for one in result.sittings]
    return "\n".join([*lines, limits_text(limits), *(render_part(limits, part) for part in result.parts)])


def limits_text(limits: Limits) -> str:
    return (
        f"Limits measured: {limits.bytes_per_s / 1e9:,.1f} GB/s read, "
        f"{limits.flops_per_s / 1e9:,.0f} GFLOP/s in bfloat16."
    )


def render_part(limits: Limits, part: Part) -> str:
    best = {}
    if part.shape in SHAPES:  # the minimum cost of a step is not known for other families
        cost = Cost(SHAPES[part.shape], part.weights, limits)
        best = {name: value for name in FIGURES if (value := cost.best(name)) is not None}
    values = by_figure(part.turns)
    goals = GOALS_OF_4_BITS if part.weights == "int4" else {}
    lines = compare(values, best, near_limits=part.shape != TINY, goals=goals)
    texts = ["", table(f"{part.shape}, {part.weights}", lines)]
    if (share := streamed_share(values)) is not None:
        reached = "reached" if share >= STREAMED_GOAL else "missed"
        texts.append(f"\nOver HTTP ours gives {share:.0%} of its output in process ({STREAMED_GOAL:.0%} {reached}).")
    if noisy := sorted(disturbed(part.turns)):
        names = ", ".join(f"{engine} ({figure})" for engine, figure in noisy)
        texts.append(f"\nOthers were using the machine in every turn of {names}.")
    texts += [f"\n{one.engine} is missing from {one.what} on: {one.reason}" for one in part.failures]
    found = ((name, version) for packages in part.versions.values() for name, version in packages.items())
    texts.append("\nVersions: " + ", ".join(f"{name} {version}" for name, version in dict(found).items()))
    return "\n".join(texts)
