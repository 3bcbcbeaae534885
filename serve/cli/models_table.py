"""`penstock models`: list the supported architectures, their implementations and their features."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from runtime.errors import ConfigurationError
from runtime.loading.checkpoint import locate
from runtime.modeling.entry import Entry
from runtime.models.encoders import ENCODERS
from runtime.models.refused import REFUSED
from runtime.models.registry import ARCHITECTURES, find, unsupported

HEAD = ("architecture", "computed by", "gives", "ranks", "CPU graph", "CUDA graph", "quantised")
TEXT, VECTORS, SCORES = "text, vectors", "vectors", "scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The implementation and the features of one architecture."""

    architecture: str
    computed_by: str  # a file of runtime.models, or "transformers"
    gives: str
    ranks: str
    cpu_graph: bool
    cuda_graph: bool
    quantised: str


def main(words: Sequence[str]) -> int:
    """Print the features of the named architectures, or of all.

    Return 1 if a name is unknown, or if all named architectures are refused, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="penstock models", description="List the supported architectures and their features."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="an architecture, as config.json names it, or a part of its name; a model's folder or Hub repository",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(words)
    selected = {name: rows_of(name) for name in options.names}
    refused = [each for name in selected for each in _refused(name)]
    unknown = [name for name, found in selected.items() if not found and not _refused(name)]
    known = [each for found in selected.values() for each in found] if options.names else rows()
    if options.json:
        sys.stdout.buffer.write(orjson.dumps([asdict(each) for each in known], option=orjson.OPT_INDENT_2) + b"\n")
    elif known:
        sys.stdout.write(as_text(known))
    for name in refused:
        sys.stderr.write(f"penstock: {unsupported(name)}\n")
    if unknown:
        sys.stderr.write(f"penstock: neither Penstock nor transformers implements {', '.join(unknown)}.\n")
    return 1 if unknown or (refused and not known) else 0


def rows() -> list[Row]:
    """Return the rows of all architectures with a native implementation, sorted by name."""
    return [_of_family(name, entry) for name, entry in sorted({**ARCHITECTURES, **ENCODERS}.items())]


def rows_of(name: str) -> list[Row]:
    """Return the rows that match `name`: an architecture, a part of architectures' names, or a model's path.

    The list is empty if nothing matches. Raises `ConfigurationError` if the model cannot be read.
    """
    if "/" in name or Path(name).is_dir():
        return [each for architecture in _architectures(name) if (each := row(architecture)) is not None]
    exact = find(name)
    if exact is not None:
        return [_of_family(name, exact)]
    alike = [each for each in rows() if name.lower() in each.architecture.lower()]
    if alike and name not in REFUSED:
        return alike
    foreign = row(name)
    if foreign is not None:
        return [foreign]
    from runtime.models.by_transformers.facts import text_models

    return [found for each in text_models() if name.lower() in each.lower() and (found := row(each))]


def _refused(name: str) -> list[str]:
    """Return the refused architectures whose names contain this text."""
    return [each for each in REFUSED if name.lower() in each.lower()]


def _architectures(model: str) -> list[str]:
    """Return the architectures in the config.json of a folder or a Hub repository."""
    path = Path(locate(model, None, None, weights=False)) / "config.json"
    try:
        named = orjson.loads(path.read_bytes()).get("architectures")
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        raise ConfigurationError(f"{model}: config.json cannot be read: {error}") from None
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def row(name: str) -> Row | None:
    """Return the row of one architecture, or None if it is refused or has no implementation.

    Imports transformers if Penstock itself does not implement the architecture.
    """
    if name in REFUSED:
        return None
    entry = find(name)
    if entry is not None:
        return _of_family(name, entry)
    from runtime.models.by_transformers.facts import output_kind, usual_name

    output = output_kind(usual_name(name))  # transformers writes PhiMoEForCausalLM as PhimoeForCausalLM
    if output is None:
        return None
    return Row(
        architecture=name,
        computed_by="transformers",
        gives={"text": TEXT, "scores": SCORES}.get(output, VECTORS),
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
        cuda_graph=generates,
        quantised="when loaded" if entry.encoder else "yes",
    )


def as_text(table_rows: Sequence[Row]) -> str:
    """Return an aligned table."""
    cells = [HEAD, *(cells_of(each) for each in table_rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines) + "\n"


def cells_of(each: Row) -> tuple[str, ...]:
    flags = ("yes" if flag else "no" for flag in (each.cpu_graph, each.cuda_graph))
    return (each.architecture, each.computed_by, each.gives, each.ranks, *flags, each.quantised)
