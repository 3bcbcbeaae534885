"""xgrammar and outlines-core get only grammars that they enforce. llguidance compiles all others."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import grammars
from random_schemas import SchemaWriter, instances
from runtime.grammar.backends.automaton_cache import AutomatonCache
from runtime.grammar.backends.backend import Backend
from runtime.grammar.backends.plain_schema import Enforced, plain_schema
from runtime.grammar.backends.with_llguidance import LLGuidanceMatcher
from runtime.grammar.load import FirstOf
from runtime.grammar.schema.references import Unsupported
from runtime.grammar_spec import Grammar, InvalidGrammar

VALIDATOR = jsonschema.Draft202012Validator
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b-1", 3, True, None]},
            "minItems": 1,
            "maxItems": 3,
        },
        "pet": {"$ref": "#/$defs/pet"},
        "odd": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
    },
    "required": ["tags", "pet"],
    "$defs": {"pet": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}},
}
TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}


# Importing xgrammar takes seconds.
@pytest.fixture(scope="module", params=[pytest.param("xgrammar", marks=pytest.mark.slow), "outlines"])
def first(request: pytest.FixtureRequest) -> Backend:
    tokenizer = grammars.tokenizer()
    settings = (tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, None)
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar", reason="the extra xgrammar is not installed")
        from runtime.grammar.backends.with_xgrammar import XGrammarBackend

        return XGrammarBackend.load(*settings)
    pytest.importorskip("outlines_core", reason="the extra outlines is not installed")
    from runtime.grammar.backends.with_outlines import OutlinesBackend

    return OutlinesBackend.load(*settings)


def written(schema: Any, **options: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), **options)


def check(first: Backend, schema: Any, seed: int, counts: Counter[str]) -> None:
    try:
        matcher = first.compile(written(schema))
    except InvalidGrammar:
        counts["left"] += 1
        return
    counts["compiled"] += 1
    validator = VALIDATOR(schema)
    texts = [grammars.random_output(matcher, 31 * seed + chance, 150, first) for chance in range(4)]
    near = [json.loads(text) for text in texts if text is not None]
    counts["outputs"] += len(near)
    assert all(validator.is_valid(value) for value in near), (schema, texts)
    for data in instances(random.Random(seed), schema, near):
        accepted = grammars.accepts(matcher, json.dumps(data, ensure_ascii=False), first)
        assert validator.is_valid(data) or not accepted, (schema, data)
        counts["accepted" if accepted else "rejected"] += 1


def test_outputs_of_the_first_backend_validate(first: Backend) -> None:
    counts: Counter[str] = Counter()
    limited = {"type": "integer", "minimum": -17, "maximum": 1203}
    for seed, schema in enumerate((PERSON, limited, {"type": "array", "items": {"type": "number"}})):
        check(first, schema, seed, counts)
    assert counts["compiled"] >= 2
    assert counts["outputs"] >= 3, counts


@pytest.mark.slow
def test_outputs_of_many_schemas_validate(first: Backend) -> None:
    counts: Counter[str] = Counter()
    for seed in range(600):
        check(first, SchemaWriter(seed).schema(), seed, counts)
    assert counts["compiled"] >= 40, counts
    assert min(counts["accepted"], counts["rejected"], counts["outputs"]) >= 100, counts


def test_texts_hold_what_json_allows(first: Backend) -> None:
    matcher = first.compile(written({"type": "string"}))
    for text, expected in (
        ('"a\\n\\"é日"', True),
        ('"a\tb"', False),
        ('"a\nb"', False),
        ('"\\q"', False),
        ('"', False),
    ):
        assert grammars.accepts(matcher, text, first) is expected, text


def test_blanks_are_as_the_request_says(first: Backend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    matcher = first.compile(written(schema, whitespace=""))
    assert grammars.accepts(matcher, '{"a":null}', first)
    assert not grammars.accepts(matcher, '{"a": null}', first)


def test_two_threads_may_ask_at_once(first: Backend) -> None:
    matchers = [first.compile(written(PERSON)) for _ in range(2)]

    def fill(which: int) -> bytes:
        masks = np.zeros((8, grammars.backend().num_words), np.int32)
        for _ in range(100):
            first.fill_masks([matchers[which]] * 8, masks)
        return masks.tobytes()

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(fill, range(2))
    assert one == other


def test_what_ended_or_failed_allows_nothing_else(first: Backend) -> None:
    matcher = first.compile(written({"type": "null"}))
    ends = grammars.tokenizer().eos_ids
    [ids] = grammars.tokenizer().encode_batch(["null"], add_special_tokens=False)
    ended, failed = matcher.copy(), matcher.copy()
    assert ended.consume([*ids, min(ends)])
    assert grammars.allowed(ended, first) <= ends
    assert not failed.consume([*ids, *ids])
    assert failed.error
    assert not grammars.allowed(failed, first)
    assert grammars.accepts(matcher, "null", first)  # the copies did not change the matcher


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("pattern", {"type": "string", "pattern": "^a$"}),
        ("maxLength", {"type": "string", "maxLength": 3}),
        ("allOf", {"type": "array", "uniqueItems": True, "items": {"enum": [1, "a"]}}),
        ("$ref", TREE),
        ("additionalProperties", {"type": "object", "properties": {"a": {}}, "additionalProperties": True}),
        ("multipleOf", {"type": "integer", "multipleOf": 3}),
        ("type", {}),
    ],
)
def test_what_is_not_enforced_is_named(keyword: str, schema: Any) -> None:
    known = Enforced({"string": frozenset(), "integer": frozenset(), "array": frozenset({"items"}),
                      "object": frozenset({"properties", "required", "additionalProperties"})}, 1_000)  # fmt: skip
    with pytest.raises(Unsupported) as caught:
        plain_schema(json.dumps(schema), known)
    assert keyword in str(caught.value) or caught.value.keyword in ("uniqueItems", "schema"), caught.value


def test_what_the_first_leaves_goes_to_llguidance(first: Backend) -> None:
    both = FirstOf(first, grammars.backend())
    kinds: list[Grammar] = [
        written(PERSON),
        written({"type": "string", "pattern": "^a{2}$"}),
        Grammar("regex", "b{3}"),
        Grammar("json_object"),
        written({"type": "null"}),
    ]
    matchers = [both.compile(grammar) for grammar in kinds]
    assert [isinstance(matcher, LLGuidanceMatcher) for matcher in matchers] == [
        False,
        True,
        True,
        True,
        False,
    ]
    together = np.zeros((len(matchers), both.num_words), np.int32)
    both.fill_masks(matchers, together)
    for row, matcher in enumerate(matchers):
        alone = np.zeros((1, both.num_words), np.int32)
        both.fill_masks([matcher], alone)
        assert np.array_equal(together[row], alone[0])
        assert together[row].any()


def test_automata_are_kept_on_disk_unless_they_are_damaged(tmp_path: Path) -> None:
    cache = AutomatonCache(tmp_path / "automata")
    key = (b"one", b"two")
    assert cache.get(key) is None
    cache.put(key, b"x" * 1000)
    assert cache.get(key) == b"x" * 1000
    assert cache.get((b"onet", b"wo")) is None
    [file] = (tmp_path / "automata").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.get(key) is None


def test_outlines_reads_what_it_kept(tmp_path: Path) -> None:
    pytest.importorskip("outlines_core", reason="the extra outlines is not installed")
    from runtime.grammar.backends.with_outlines import OutlinesBackend

    tokenizer, cache = grammars.tokenizer(), AutomatonCache(tmp_path)
    for _ in range(2):
        backend = OutlinesBackend.load(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, None, cache)
        matcher = backend.compile(written(PERSON))
        assert len(list(tmp_path.iterdir())) == 1
        assert grammars.accepts(matcher, '{"tags": ["a"], "pet": {"kind": "cat"}}', backend)
        assert not grammars.accepts(matcher, '{"tags": ["a"], "pet": {"kind": "dog"}}', backend)


def test_a_backend_refuses_matchers_of_another_one(first: Backend) -> None:
    """If the row of a foreign matcher were skipped, each later matcher would get the mask of its neighbour."""
    others = [grammars.compiled("regex", "a"), first.compile(Grammar("json_schema", '{"type": "null"}'))]
    for backend in (grammars.backend(), first):
        with pytest.raises(TypeError, match="only kind of matcher"):
            backend.fill_masks(others, np.zeros((2, backend.num_words), np.int32))
