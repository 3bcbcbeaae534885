"""`just study schemas` on a folder, against what is known of its instances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.property_order import in_schema_order
from bench.schemas import cases
from runtime.errors import ConfigurationError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def case(schema: Any, valid: list[Any], invalid: list[Any]) -> str:
    tests = [{"data": data, "valid": True} for data in valid] + [{"data": data, "valid": False} for data in invalid]
    return json.dumps({"schema": schema, "tests": tests, "meta": {}})


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = case(PERSON, [{"name": "é", "age": 3}, {"age": 3, "name": "x"}], [{"age": 3}, {"name": "x", "age": -1}])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "person.json").write_text(person)
    (tmp_path / "bare.json").write_text('{"type": "integer"}')
    wrong = case({"type": "integer"}, [2.0, "not an integer"], [7])
    (tmp_path / "many.jsonl").write_text(f"{wrong}\n\n{case({'uniqueItems': True}, [], [[1, 1]])}\n")
    assert main(["schemas", "--schemas", str(tmp_path), "--output-file", str(tmp_path / "r.out")]) == 0
    result = json.loads((tmp_path / "r.out").read_text())
    found = {each["name"]: each for each in result["schemas"]}
    assert set(found) == {"bare.json", "below/person.json", "many.jsonl:1", "many.jsonl:3"}
    assert found["below/person.json"]["valid_rejected"] == found["below/person.json"]["invalid_accepted"] == []
    assert found["below/person.json"]["reordered"] == [1]
    assert found["many.jsonl:1"]["valid_rejected"] == [0, 1]
    assert found["many.jsonl:1"]["invalid_accepted"] == [2]
    assert found["many.jsonl:3"]["keyword"] == "uniqueItems"
    assert "at /uniqueItems" in found["many.jsonl:3"]["refused"]
    figures = result["results"]
    assert (figures["schemas"], figures["compiled"], figures["refused"]) == (4, 3, 1)
    assert (figures["valid_instances"], figures["valid_rejected"], figures["invalid_accepted"]) == (4, 2, 1)
    assert figures["refused_by_keyword"] == {"uniqueItems": 1}
    assert figures["compile_ms"]["max"] > 0 < figures["mask_us"]["p99"]
    printed = capsys.readouterr().out
    assert "many.jsonl:1: tests 2" in printed
    assert "refused: uniqueItems" in printed


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schemas", "--schemas", str(tmp_path / "none")]) == 2
    (tmp_path / "x.json").write_text("{")
    assert main(["schemas", "--schemas", str(tmp_path)]) == 2
    assert "x.json cannot be read" in capsys.readouterr().err
    with pytest.raises(ConfigurationError):
        list(cases(tmp_path / "x.json"))


def test_names_come_in_the_schemas_order_and_nothing_else_changes() -> None:
    tree = {
        "$ref": "#/definitions/node",
        "definitions": {"node": {"properties": {"v": {}, "kids": {"items": {"$ref": "#/definitions/node"}}}}},
    }
    value = {"x": 1, "kids": [{"kids": [], "v": 2}], "v": 1}
    ordered = in_schema_order(value, tree)
    assert ordered == value
    assert json.dumps(ordered) == '{"v": 1, "kids": [{"v": 2, "kids": []}], "x": 1}'
    assert in_schema_order(value, {"$ref": "#"}) == value
