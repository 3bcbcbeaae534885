"""`penstock models` and docs/models.md agree with the registry, and with the declarations of the models' tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.documents import models_markdown
from runtime.models.encoders import ENCODERS
from runtime.models.registry import ARCHITECTURES
from serve.cli.main import run
from serve.cli.models_table import rows

ROOT = Path(__file__).parents[3]


def test_document_is_written_from_the_registry() -> None:
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == models_markdown(), "run `just docs`"


def test_every_architecture_is_listed_as_the_tests_of_models_declare_it() -> None:
    by_name = {row.architecture: row for row in rows()}
    assert by_name.keys() == {*ARCHITECTURES, *ENCODERS}
    for row in rows():
        assert row.cpu_graph is not row.architecture.startswith("MPNet")  # see test_parity.py and test_encoders.py
        family = ROOT / "runtime" / "models" / row.computed_by
        assert len(family.read_text(encoding="utf-8").splitlines()) <= 200


def test_command_prints_one_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json", "Qwen3ForSequenceClassification", "BertModel", "PersimmonForCausalLM"]) == 0
    classifier, encoder, foreign = json.loads(capsys.readouterr().out)
    assert (classifier["computed_by"], classifier["gives"], classifier["ranks"]) == (
        "qwen3.py",
        "scores",
        "tp, pp",
    )
    assert (encoder["gives"], encoder["cpu_graph"], encoder["quantised"]) == ("vectors", True, "when loaded")
    assert (foreign["computed_by"], foreign["ranks"]) == ("transformers", "one")
    assert run(["models", "NoSuchModel"]) == 1
    assert "NoSuchModel" in capsys.readouterr().err
    assert run(["models", "MllamaForConditionalGeneration", "grok"]) == 1
    reasons = capsys.readouterr().err
    assert "cross-attention" in reasons
    assert "Grok1ForCausalLM is not supported: its" in reasons
    assert run(["models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows()) + 1


def test_names_may_be_parts_models_and_spelt_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert run(["models", "--json", str(tmp_path)]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert one["architecture"] == "Qwen3ForCausalLM"
    assert run(["models", "--json", "llama"]) == 0
    found = {each["architecture"] for each in json.loads(capsys.readouterr().out)}
    assert "LlamaForCausalLM" in found
    assert all("llama" in name.lower() for name in found)
    assert run(["models", "--json", "PhiMoEForCausalLM"]) == 0
    [foreign] = json.loads(capsys.readouterr().out)
    assert foreign["computed_by"] == "transformers"
    assert run(["models", "--json", "phimoe"]) == 0
    assert [each["architecture"] for each in json.loads(capsys.readouterr().out)] == ["PhimoeForCausalLM"]
    assert run(["models", str(tmp_path / "none" / "here")]) == 2
