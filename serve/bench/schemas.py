"""`schemas`: what the grammars of JSON schemas accept, and what they cost, without a model.

Made for the layout of JSONSchemaBench and its MaskBench: files with `{"schema", "tests": [{"data", "valid"}]}`. Any
other JSON file is taken for a schema without instances.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from runtime.config.plan import TokenizerPlan
from runtime.constraint import allows
from runtime.errors import ConfigurationError
from runtime.grammar.json_schema import Unsupported
from runtime.grammar.with_llguidance import LLGuidanceBackend, LLGuidanceMatcher
from runtime.grammar_spec import Grammar, InvalidGrammar
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer.tokenizer import Tokenizer
from serve.bench import report
from serve.bench.metrics import Summary, summarize
from serve.bench.options import add_output_options, new_parser
from serve.bench.property_order import in_schema_order
from serve.demo import demo_path

MAX_LISTED = 20  # schemas that the table names for each thing that went wrong


@dataclass(slots=True)
class SchemaReport:
    """What one schema's grammar does. Instances are named by their index in the file."""

    name: str
    compile_ms: float = 0.0
    refused: str = ""  # why; the schema has no grammar then
    keyword: str = ""  # that it was refused for
    num_valid: int = 0
    num_invalid: int = 0
    valid_rejected: list[int] = field(default_factory=list)
    # Accepted once their names stood in the schema's order.
    reordered: list[int] = field(default_factory=list)
    invalid_accepted: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # a limit of the grammar was reached
    masks_us: list[float] = field(default_factory=list, repr=False)


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "schemas",
        "Compile the JSON schemas of a folder, and ask of each instance token by token whether it could be an output.",
    )
    options.add_argument(
        "--schemas", required=True, help="folder, read with all below it, or one file: *.json, *.jsonl"
    )
    options.add_argument("--tokenizer", help="folder with tokenizer.json; without: the demo model's")
    options.add_argument("--limit", type=int, help="files read, in the order of their names")
    options.add_argument("--whitespace-pattern", help="as --constrained-json-whitespace-pattern")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    path = options.tokenizer or demo_path()
    if path is None:
        raise ConfigurationError("There is no demo model here; name a folder with --tokenizer.")
    bench = SchemaBench(read(path), options.whitespace_pattern)
    reports: list[SchemaReport] = []
    for name, content in cases(Path(options.schemas), options.limit):
        reports.append(bench.measure(name, content))
    if not reports:
        raise ConfigurationError(f"There are no JSON files in {options.schemas}.")
    report.say(render(reports))
    if options.output_file:
        results, details = summary(reports), [_public(each) for each in reports]
        content = report.document("schemas", vars(options), results, None, argv)
        report.write(options.output_file, {**content, "schemas": details})
    return 0


def read(path: str) -> Tokenizer:
    """A folder's tokenizer. Raises `ConfigurationError`."""
    plan = TokenizerPlan(
        tokenizer_path=path, mode="auto", trust_remote_code=False, revision=None, chat_template=None
    )
    files = read_tokenizer(plan)
    return Tokenizer(files.backend, files.special)


def cases(path: Path, limit: int | None = None) -> Iterator[tuple[str, Any]]:
    """Names and contents; a line of a .jsonl file is one case. Raises `ConfigurationError`."""
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist.")
    files = [path] if path.is_file() else sorted([*path.rglob("*.json"), *path.rglob("*.jsonl")])
    for file in files[:limit]:
        name = file.name if path.is_file() else str(file.relative_to(path))
        try:
            text = file.read_text()
            if file.suffix == ".jsonl":
                for number, line in enumerate(text.splitlines(), 1):
                    if line.strip():
                        yield f"{name}:{number}", json.loads(line)
            else:
                yield name, json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{file} cannot be read: {error}") from None


class SchemaBench:
    """One tokenizer's vocabulary, and the measurements of one schema after the other."""

    def __init__(self, tokenizer: Tokenizer, whitespace: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.eos_ids
        try:
            self._backend = LLGuidanceBackend.load(
                tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, whitespace
            )
        except InvalidGrammar as error:
            raise ConfigurationError(f"Outputs of this tokenizer cannot be constrained: {error}.") from None
        self._mask = np.zeros((1, self._backend.num_words), np.int32)

    def measure(self, name: str, content: Any) -> SchemaReport:
        """One file: a schema, or one with its instances."""
        found = SchemaReport(name)
        has_tests = (
            isinstance(content, dict) and "schema" in content and isinstance(content.get("tests"), list)
        )
        schema, tests = (content["schema"], content["tests"]) if has_tests else (content, [])
        source = schema if isinstance(schema, str) else json.dumps(schema)
        began_s = perf_counter()
        try:
            matcher = self._backend.compile(Grammar("json_schema", source))
        except InvalidGrammar as error:
            found.refused = str(error)
            found.keyword = error.keyword if isinstance(error, Unsupported) else "(grammar)"
            matcher = None
        found.compile_ms = 1e3 * (perf_counter() - began_s)
        for index, test in enumerate(tests):
            valid = bool(test.get("valid"))
            found.num_valid += valid
            found.num_invalid += not valid
            if matcher is not None:
                self._try(found, matcher, schema, index, test.get("data"), valid)
        return found

    def _try(
        self, found: SchemaReport, matcher: LLGuidanceMatcher, schema: Any, index: int, data: Any, valid: bool
    ) -> None:
        accepted = self.accepts(matcher, _text(data), found, index)
        if not accepted:
            # Names come in the schema's order; an object says the same in any.
            ordered = _text(in_schema_order(data, schema))
            if ordered != _text(data) and self.accepts(matcher, ordered, found, index):
                accepted = True
                found.reordered.append(index)
        if valid and not accepted:
            found.valid_rejected.append(index)
        if accepted and not valid:
            found.invalid_accepted.append(index)

    def accepts(self, matcher: LLGuidanceMatcher, text: str, found: SchemaReport, index: int = 0) -> bool:
        """Whether a text, as the tokenizer cuts it, is a whole output: each token is in the mask before it."""
        [ids] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        at = matcher.copy()
        for token_id in ids:
            if not self._allows(at, token_id, found) or not at.consume([token_id]):
                break
        else:
            return self._allows(at, None, found)
        if at.error and index not in found.failed:
            found.failed.append(index)
        return False

    def _allows(self, matcher: LLGuidanceMatcher, token_id: int | None, found: SchemaReport) -> bool:
        """Whether a token may come next; None: an end."""
        began_s = perf_counter()
        self._backend.fill_masks([matcher], self._mask)
        found.masks_us.append(1e6 * (perf_counter() - began_s))
        ids = self._ends if token_id is None else (token_id,)
        return any(allows(self._mask[0], each) for each in ids)


def summary(reports: Sequence[SchemaReport]) -> dict[str, Any]:
    """The figures over all schemas."""
    compiled = [each for each in reports if not each.refused]
    return {
        "schemas": len(reports),
        "compiled": len(compiled),
        "refused": len(reports) - len(compiled),
        "valid_instances": sum(each.num_valid for each in compiled),
        "valid_rejected": sum(len(each.valid_rejected) for each in compiled),
        "accepted_in_schema_order": sum(len(each.reordered) for each in compiled),
        "invalid_instances": sum(each.num_invalid for each in compiled),
        "invalid_accepted": sum(len(each.invalid_accepted) for each in compiled),
        "limits_reached": sum(len(each.failed) for each in compiled),
        "refused_by_keyword": dict(Counter(each.keyword for each in reports if each.refused).most_common()),
        "compile_ms": summarize(each.compile_ms for each in compiled),
        "mask_us": summarize(time_us for each in compiled for time_us in each.masks_us),
    }


def render(reports: Sequence[SchemaReport]) -> str:
    """The summary as a table, and the schemas in which something is wrong."""
    figures = summary(reports)
    rows = [
        (name.replace("_", " "), value)
        for name, value in figures.items()
        if not isinstance(value, dict | Summary)
    ]
    rows += [(f"refused: {name}", number) for name, number in figures["refused_by_keyword"].items()]
    distributions = {"compile (ms)": figures["compile_ms"], "mask (us)": figures["mask_us"]}
    parts = [report.table("schemas", rows, distributions, heads=("mean", "median", "p90", "p99", "max"))]
    for title, attribute in (
        ("invalid instances accepted", "invalid_accepted"),
        ("valid instances rejected", "valid_rejected"),
    ):
        named = [(each.name, getattr(each, attribute)) for each in reports if getattr(each, attribute)]
        if named:
            parts.append(f"-- {title}")
            parts += [f"{name}: tests {_listed(tests)}" for name, tests in named[:MAX_LISTED]]
            if len(named) > MAX_LISTED:
                parts.append(f"... and {len(named) - MAX_LISTED} more schemas")
    return "\n".join(parts)


def _public(found: SchemaReport) -> dict[str, Any]:
    """One schema's figures, its mask times as a distribution."""
    content = report.plain(found)
    del content["masks_us"]
    return {**content, "mask_us": report.plain(summarize(found.masks_us))}


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")


def _text(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)
