"""`schemas`: acceptance and costs of the grammars of JSON schemas, without a model.

For the layout of JSONSchemaBench and its MaskBench: files with `{"schema", "tests": [{"data", "valid"}]}`.
Any other JSON file is treated as a schema without instances.
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

from bench import PROGRAM
from bench.property_order import in_schema_order
from runtime.config.plan import TokenizerPlan
from runtime.constraint import allows
from runtime.errors import ConfigurationError
from runtime.grammar.backends.with_llguidance import LLGuidanceBackend, LLGuidanceMatcher
from runtime.grammar.schema.writer import Unsupported
from runtime.grammar_spec import Grammar, InvalidGrammar
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer.tokenizer import Tokenizer
from serve.bench import report
from serve.bench.metrics import Summary, summarize
from serve.bench.options import add_output_options, new_parser
from serve.demo import demo_path

MAX_LISTED = 20  # schemas that the table names per kind of error


@dataclass(slots=True)
class SchemaReport:
    """Results of one schema's grammar. Instances are identified by their index in the file."""

    name: str
    compile_ms: float = 0.0
    refused: str = ""  # reason why the schema has no grammar; empty if it has one
    keyword: str = ""  # keyword that caused the refusal
    num_valid: int = 0
    num_invalid: int = 0
    valid_rejected: list[int] = field(default_factory=list)
    # Instances accepted only with their names in the schema's order.
    reordered: list[int] = field(default_factory=list)
    invalid_accepted: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # instances that reached a limit of the grammar
    masks_us: list[float] = field(default_factory=list, repr=False)


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "schemas",
        "Compile the JSON schemas of a folder, and check token by token whether each instance is a possible output.",
        program=PROGRAM,
    )
    options.add_argument("--schemas", required=True, help="folder (searched recursively) or one file: *.json, *.jsonl")
    options.add_argument("--tokenizer", help="folder with tokenizer.json; default: the demo model's")
    options.add_argument("--limit", type=int, help="maximum number of files, in the order of their names")
    options.add_argument("--whitespace-pattern", help="like the engine's --constrained-json-whitespace-pattern")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    path = options.tokenizer or demo_path()
    if path is None:
        raise ConfigurationError("There is no demo model in this installation; set --tokenizer.")
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
    """Return the tokenizer of a folder. Raises `ConfigurationError`."""
    plan = TokenizerPlan(tokenizer_path=path, mode="auto", trust_remote_code=False, revision=None, chat_template=None)
    files = read_tokenizer(plan)
    return Tokenizer(files.backend, files.special)


def cases(path: Path, limit: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield names and contents; each line of a .jsonl file is one case. Raises `ConfigurationError`."""
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
    """Measures schemas with one tokenizer's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, whitespace: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.eos_ids
        try:
            self._backend = LLGuidanceBackend.load(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, whitespace)
        except InvalidGrammar as error:
            raise ConfigurationError(f"Outputs of this tokenizer cannot be constrained: {error}.") from None
        self._mask = np.zeros((1, self._backend.num_words), np.int32)

    def measure(self, name: str, content: Any) -> SchemaReport:
        """Measure one case: a schema, with or without instances."""
        measured = SchemaReport(name)
        has_tests = isinstance(content, dict) and "schema" in content and isinstance(content.get("tests"), list)
        schema, tests = (content["schema"], content["tests"]) if has_tests else (content, [])
        source = schema if isinstance(schema, str) else json.dumps(schema)
        began_s = perf_counter()
        try:
            matcher = self._backend.compile(Grammar("json_schema", source))
        except InvalidGrammar as error:
            measured.refused = str(error)
            measured.keyword = error.keyword if isinstance(error, Unsupported) else "(grammar)"
            matcher = None
        measured.compile_ms = 1e3 * (perf_counter() - began_s)
        for index, test in enumerate(tests):
            valid = bool(test.get("valid"))
            measured.num_valid += valid
            measured.num_invalid += not valid
            if matcher is not None:
                self._try(measured, matcher, schema, index, test.get("data"), valid)
        return measured

    def _try(
        self,
        measured: SchemaReport,
        matcher: LLGuidanceMatcher,
        schema: Any,
        index: int,
        data: Any,
        valid: bool,
    ) -> None:
        accepted = self.accepts(matcher, _text(data), measured, index)
        if not accepted:
            # The grammar fixes the order of names, but objects are equal in any order.
            ordered = _text(in_schema_order(data, schema))
            if ordered != _text(data) and self.accepts(matcher, ordered, measured, index):
                accepted = True
                measured.reordered.append(index)
        if valid and not accepted:
            measured.valid_rejected.append(index)
        if accepted and not valid:
            measured.invalid_accepted.append(index)

    def accepts(self, matcher: LLGuidanceMatcher, text: str, measured: SchemaReport, index: int = 0) -> bool:
        """Whether the tokenized text is a complete output: each token is in the mask at its position."""
        [ids] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        position_matcher = matcher.copy()
        for token_id in ids:
            if not self._allows(position_matcher, token_id, measured) or not position_matcher.consume([token_id]):
                break
        else:
            return self._allows(position_matcher, None, measured)
        if position_matcher.error and index not in measured.failed:
            measured.failed.append(index)
        return False

    def _allows(self, matcher: LLGuidanceMatcher, token_id: int | None, measured: SchemaReport) -> bool:
        """Whether a token may come next; None: the end of the output."""
        began_s = perf_counter()
        self._backend.fill_masks([matcher], self._mask)
        measured.masks_us.append(1e6 * (perf_counter() - began_s))
        ids = self._ends if token_id is None else (token_id,)
        return any(allows(self._mask[0], each) for each in ids)


def summary(reports: Sequence[SchemaReport]) -> dict[str, Any]:
    """Return the results over all schemas."""
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
    """Return the summary as a table, with the schemas that have errors."""
    figures = summary(reports)
    rows = [(name.replace("_", " "), value) for name, value in figures.items() if not isinstance(value, dict | Summary)]
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


def _public(measured: SchemaReport) -> dict[str, Any]:
    """Return one schema's results, with its mask times as a distribution."""
    content = report.plain(measured)
    del content["masks_us"]
    return {**content, "mask_us": report.plain(summarize(measured.masks_us))}


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")


def _text(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)
