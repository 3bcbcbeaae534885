"""Results of `drafts` over several runs: one line of JSON for each family and method, and the page that shows them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from draft_matrix import Found
from serve.bench.report import cpu_name

_PAGE = """\
# Draft methods and families

`just study drafts --results FILE` compares decoding with drafts to plain decoding, and `just study drafts --page FILE`
writes this page. Each model is a tiny random checkpoint of the family. Its drafts are made right for three of four
tokens, so that runs of all lengths are accepted. All requests are computed one at a time, one at a time with cached
prompts, and all at once with a warm and a cold cache. Prompts are computed in chunks of 16 tokens, and the pool of 208
tokens is so small that sequences are retracted. The requests are greedy and sampled, and have penalties, grammars,
stop strings, biases, minimum lengths and (for some families) a LoRA adapter. Output tokens must be equal.

On one rank, steps run in the CPU graph, as usual. With two ranks, they are computed operation by operation.

{conditions}.

| family | ranks | methods | outputs | different | drafts accepted | retractions |
|---|---|---|---|---|---|---|
"""


def append(path: Path, family: str, method: str, tp_size: int, found: Found | None) -> None:
    """Append the result for a family and a method. `found` is None if the family does not support draft trees."""
    values: dict[str, Any] = {"family": family, "method": method, "tp_size": tp_size}
    values |= {} if found is None else {**found._asdict(), "different": len(found.different)}
    values |= {"date": datetime.now(UTC).date().isoformat(), "machine": _machine()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def page(path: Path) -> str:
    """Return the page about the results in this file. A later result replaces an earlier one of the same comparison."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    results = {(each["family"], each["tp_size"], each["method"]): each for each in lines}
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for family, tp_size, method in sorted(results):
        groups.setdefault((family, tp_size), []).append(results[family, tp_size, method])
    dates = sorted({each["date"] for each in results.values()})
    machines = sorted({each["machine"] for each in results.values()})
    conditions = "; ".join([" to ".join(dict.fromkeys([dates[0], dates[-1]])), *machines])
    return _PAGE.format(conditions=conditions) + "".join(_row(*key, group) for key, group in groups.items())


def _row(family: str, tp_size: int, group: Iterable[Mapping[str, Any]]) -> str:
    compared = [each for each in group if "accepted" in each]
    names = ", ".join(f"`{each['method']}`" for each in compared)
    sums = (sum(each[name] for each in compared) for name in ("num_outputs", "different", "accepted", "retracted"))
    ranks = f"{tp_size} (tp)" if tp_size > 1 else "1"
    return f"| {family} | {ranks} | {names} | {' | '.join(map(str, sums))} |\n"


def _machine() -> str:
    versions = (
        f"Python {platform.python_version()}, PyTorch {torch.__version__}, transformers {transformers.__version__}"
    )
    return f"{cpu_name()}, {os.cpu_count()} cores, {versions}"
