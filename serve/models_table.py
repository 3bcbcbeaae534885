"""`penstock models`: every architecture that is served, what computes it, and what it can be combined with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import orjson

from runtime.models.encoders import ENCODERS
from runtime.models.entry import Entry
from runtime.models.registry import ARCHITECTURES, HEADS, find

TEXT, VECTORS, SCORES = "text, vectors", "vectors", "scores"
_DOCUMENT = """\
# Models

Every architecture that a family of ours computes, written by `penstock models --table`; `penstock models NAME` says it
of one, also of those that [transformers computes](models-by-transformers.md): nearly all its other causal language
models, each of which is tried before it serves. The name is that of `architectures`
in config.json.

- *gives*: text, vectors ([embeddings](embeddings.md)), or scores (classifying, ranking).
- *ranks*: whether `--tp-size` cuts its layers and `--pp-size` shares them ([parallelism](parallelism.md)).
- *CPU graph*: whether a step on a CPU is one native call ([architecture](architecture.md)). *CUDA graph*: whether steps
  of single tokens are captured on a GPU.
- *quantised*: whether [quantised weights](quantization.md) are taken, stored so or rounded when loaded; *when loaded*:
  the latter alone.
"""
_HEADS = """
Each of the decoders is also served with another head in the place of `ForCausalLM`, where a checkpoint names it:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture. What is not said is not known before a checkpoint is loaded."""

    architecture: str
    computed_by: str  # a file of ours, or "transformers"
    gives: str
    ranks: str
    cpu_graph: bool
    cuda_graph: bool
    quantised: str


def main(words: Sequence[str]) -> int:
    """Print what is known of the named architectures, or of all; returns the exit status, 1 for an unknown one."""
    parser = argparse.ArgumentParser(
        prog="penstock models", description="List the architectures that are served, and how."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="an architecture, as config.json names it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--table", action="store_true", help="print docs/models.md")
    options = parser.parse_args(words)
    if options.table:
        sys.stdout.write(markdown())
        return 0
    found = [row(name) for name in options.names] if options.names else rows()
    unknown = [name for name, each in zip(options.names, found) if each is None]
    known = [each for each in found if each is not None]
    if options.json:
        sys.stdout.buffer.write(
            orjson.dumps([asdict(each) for each in known], option=orjson.OPT_INDENT_2) + b"\n"
        )
    elif known:
        sys.stdout.write(as_text(known))
    if unknown:
        sys.stderr.write(
            f"penstock: neither a family of ours nor transformers computes {', '.join(unknown)}.\n"
        )
    return 1 if unknown else 0


def rows() -> list[Row]:
    """Of all architectures that a family of ours computes, by their names."""
    return [_of_family(name, entry) for name, entry in sorted({**ARCHITECTURES, **ENCODERS}.items())]


def row(name: str) -> Row | None:
    """Of one architecture; None where nothing computes it. May import transformers."""
    entry = find(name)
    if entry is not None:
        return _of_family(name, entry)
    from runtime.models.by_transformers.facts import gives

    given = gives(name)
    if given is None:
        return None
    return Row(
        architecture=name,
        computed_by="transformers",
        gives={"text": TEXT, "scores": SCORES}.get(given, VECTORS),
        ranks="one",
        cpu_graph=False,
        cuda_graph=False,
        quantised="no",
    )


def _of_family(name: str, entry: Entry) -> Row:
    generates = not (entry.encoder or entry.headless)
    return Row(
        architecture=name,
        computed_by=entry.file,
        gives=SCORES if entry.scores else TEXT if generates else VECTORS,
        ranks="one" if entry.encoder else "tp, pp",
        cpu_graph=entry.captured or not entry.encoder,
        cuda_graph=generates and entry.captured and not entry.recurrent,
        quantised="when loaded" if entry.encoder else "yes",
    )


def as_text(found: Sequence[Row]) -> str:
    """An aligned table."""
    cells = [_HEAD, *(_cells(each) for each in found)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """docs/models.md."""
    lines = [_line(_HEAD), "|" + "---|" * len(_HEAD), *(_line(_cells(each)) for each in rows())]
    heads = [f"`{name}` ({'scores' if scores else 'vectors'})" for name, scores in HEADS.items()]
    return "\n".join([_DOCUMENT, *lines, _HEADS.rstrip(), ", ".join(heads) + ".", ""])


_HEAD = ("architecture", "computed by", "gives", "ranks", "CPU graph", "CUDA graph", "quantised")


def _cells(each: Row) -> tuple[str, ...]:
    flags = ("yes" if flag else "no" for flag in (each.cpu_graph, each.cuda_graph))
    return (each.architecture, each.computed_by, each.gives, each.ranks, *flags, each.quantised)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
