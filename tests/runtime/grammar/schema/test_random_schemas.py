"""Random JSON schemas against the jsonschema package: invalid instances are rejected, and random outputs are valid."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema
import pytest

import grammars
from bench.property_order import in_schema_order
from random_schemas import SchemaWriter, instances
from runtime.grammar_spec import InvalidGrammar

NOT_WRITTEN = ("Infinity", "e+", "e-", "\\u00", "\\ud", "-0.0")  # spellings that outputs never have
VALIDATOR = jsonschema.Draft202012Validator


def check(seed: int, counts: Counter[str], *, with_hypothesis: bool = False) -> None:
    schema = SchemaWriter(seed).schema()
    try:
        matcher = grammars.compiled("json_schema", schema)
    except InvalidGrammar:
        counts["refused"] += 1
        return
    counts["compiled"] += 1
    validator = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
    try:
        near = list(outputs(matcher, seed))
        counts["outputs"] += len(near)
        for output in near:
            assert validator.is_valid(output), (schema, output)
        if with_hypothesis:
            near += generated(schema, seed)
        for data in instances(random.Random(seed), schema, near):
            text = json.dumps(data, ensure_ascii=False)
            if any(spelling in json.dumps(data) for spelling in NOT_WRITTEN):
                continue
            ordered = json.dumps(in_schema_order(data, schema), ensure_ascii=False)
            accepted = grammars.accepts(matcher, text) or grammars.accepts(matcher, ordered)
            valid = validator.is_valid(data)
            assert valid or not accepted, (schema, data)
            counts["valid" if valid else "invalid"] += 1
            counts["valid accepted"] += valid and accepted
    except RecursionError:  # the validator fails on circular references
        counts["circular"] += 1


def outputs(matcher: Any, seed: int) -> Iterator[Any]:
    for chance in range(4):
        try:
            text = grammars.random_output(matcher, 31 * seed + chance, max_tokens=120)
        except ValueError:  # the generator reached a circular reference
            continue
        if text is not None:
            yield json.loads(text)


def generated(schema: Any, seed: int) -> list[Any]:
    """Return valid instances from hypothesis-jsonschema, if it can generate any."""
    from hypothesis_jsonschema import from_schema

    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=6,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @hypothesis.given(from_schema(schema))
    def collect(data: Any) -> None:
        found.append(data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            collect()
        except Exception:  # schemas that it cannot handle are skipped
            return found
    return found


def test_thirty_schemas() -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        check(seed, counts)
    assert counts["compiled"] >= 20, counts
    assert counts["invalid"] > 100 < counts["valid"], counts
    assert counts["valid accepted"] >= 0.9 * counts["valid"], counts


@pytest.mark.parametrize(
    "number",
    [pytest.param(60, marks=pytest.mark.slow), pytest.param(1_000, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_many_schemas_with_generated_instances(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hypothesis_jsonschema")
    counts: Counter[str] = Counter()
    for seed in range(1_000_000, 1_000_000 + number):
        check(seed, counts, with_hypothesis=True)
    with capsys.disabled():
        print(dict(counts))
    assert counts["compiled"] >= 0.7 * number, counts
    assert counts["valid accepted"] >= 0.9 * counts["valid"], counts
