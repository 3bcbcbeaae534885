"""Join the metrics of several replicas into one text in Prometheus's format."""

from __future__ import annotations

from collections.abc import Mapping


def joined_metrics(texts: Mapping[str, str]) -> str:
    """Return the metrics of all replicas in one text. `texts` maps a replica's id to its metrics.

    Each sample gets the label `replica` with the id. All samples of a metric follow its help and type lines, as
    Prometheus's format requires.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        metric = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                metric = line.split(" ", 3)[2]
                head = heads.setdefault(metric, [])
                if line not in head:
                    head.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, replica))
    return "".join(f"{line}\n" for metric in samples for line in (*heads.get(metric, ()), *samples[metric]))


def _labelled(line: str, replica: str) -> str:
    name, brace, rest = line.partition("{")
    label = f'replica="{replica}"'
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
