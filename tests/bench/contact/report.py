"""The report on all stages, as a JSON file and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from bench.gpu.figure import HEAD, Failure, Figure, line_of
from serve.bench import report

GOOD = ("passed", "measured", "refused")


class Report:
    """The results of the stages so far. `write` is called after each stage, so an interrupted run loses nothing."""

    def __init__(self, folder: Path, device: str, budget_s: float, before: Mapping[str, Any] | None = None) -> None:
        """`before` is the content of an earlier report that this run continues."""
        self._folder = folder
        self.content: dict[str, Any] = report.document("gpu-contact", {"device": device, "budget_s": budget_s}, [])
        self.content["results"] = list(before["results"]) if before else []

    @property
    def stages(self) -> list[dict[str, Any]]:
        return self.content["results"]

    def done(self, name: str) -> bool:
        """Whether this stage has a final result, which another run would not change."""
        return any(stage["name"] == name and stage["status"] in GOOD for stage in self.stages)

    def add(self, stage: dict[str, Any]) -> None:
        """Add a stage's result, replace an earlier result of the same name, and write both files."""
        self.content["results"] = [other for other in self.stages if other["name"] != stage["name"]] + [stage]
        self.write()

    def write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        report.write(str(self._folder / "contact.json"), self.content)
        (self._folder / "contact.md").write_text(markdown(self.content), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read the JSON file of an earlier run."""
    return orjson.loads(path.read_bytes())


def markdown(content: Mapping[str, Any]) -> str:
    """Return the report in Markdown: stages, failures and figures."""
    machine, versions = content["machine"], content["versions"]
    where = ", ".join(machine["gpus"]) or f"CPU ({machine['cpu']}): a rehearsal, these figures say nothing about a GPU"
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [
        f"# GPU contact, {content['date'][:10]}",
        "",
        f"{where}. {with_what}.",
        "",
        *_stage_table(content),
    ]
    parts += _failures(content)
    parts += _figures(content)
    return "\n".join(parts) + "\n"


def _stage_table(content: Mapping[str, Any]) -> list[str]:
    lines = ["| stage | result | seconds | |", "|---|---|---|---|"]
    for stage in content["results"]:
        counts = ", ".join(f"{count} {what}" for what, count in (stage.get("tests") or {}).items() if count)
        lines.append(f"| {stage['name']} | {stage['status']} | {stage['seconds']:.0f} | {counts or stage['note']} |")
    return [*lines, ""]


def _failures(content: Mapping[str, Any]) -> list[str]:
    parts: list[str] = []
    for stage in content["results"]:
        for test in stage.get("failures") or ():
            parts += [
                f"**{test['test']}**: {test['outcome']}",
                "",
                "```",
                str(test.get("why", ""))[-1500:],
                "```",
                "",
            ]
        if stage["status"] not in GOOD and not stage.get("failures"):
            parts += [
                f"**{stage['name']}**: {stage['status']}",
                "",
                "```",
                stage["output"][-1500:],
                "```",
                "",
            ]
    return ["## What failed", "", *parts] if parts else []


def _figures(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for stage in content["results"]:
        for row in stage.get("rows") or ():
            if "why" in row:
                lines.append(line_of(Failure(row["what"], row["why"])))
            else:
                lines.append(line_of(Figure(**{name: row[name] for name in Figure._fields if name in row})))
    return ["## Figures", "", *HEAD, *lines, ""] if lines else []
