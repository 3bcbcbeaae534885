from __future__ import annotations

import json

import pytest

import tiny_checkpoints
from bench import accuracy
from bench.accuracy import Agreement, Expected, Found
from runtime.errors import ConfigurationError
from serve.demo import demo_path


def test_shares_and_differences_are_those_of_all_tokens() -> None:
    expected = [Expected((1,), (5, 6, 7), (-1.0, -2.0, -3.0)), Expected((2,), (8,), (-0.5,))]
    found = [Found((5, 6, 7), (5, 9, 7), (-1.5, -2.0, -3.0)), Found((9,), (8,), (-1.0,))]
    assert Agreement.of("x", expected, found) == Agreement("x", 0.75, 0.25, 0.5)


def test_a_model_without_a_chat_template_is_refused(monkeypatch) -> None:
    import transformers

    class Bare:
        chat_template = None

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: Bare())
    with pytest.raises(ConfigurationError, match="chat template"):
        accuracy.main(["--model-path", tiny_checkpoints.cached()])


@pytest.mark.slow
def test_the_demo_model_agrees_with_transformers(tmp_path, capsys) -> None:
    if demo_path() is None:
        pytest.skip("the demo model is not here")
    file = tmp_path / "accuracy.json"
    ways = [
        "float32",
        "bfloat16",
        "w8a8_int8",
        "w4a8",
        "int4wo-32",
        "a cache in e4m3",
        "AWQ",
        "bitsandbytes nf4",
    ]
    command = ["--num-prompts", "6", "--new-tokens", "8", "--output-file", str(file), "--ways", *ways]
    assert accuracy.main(command) == 0
    float32, *others = json.loads(file.read_bytes())["results"]["agreements"]
    assert (float32["same_token"], float32["same_answer"]) == (1, 1)
    assert float32["mean_difference"] < 1e-4
    assert all(other["same_token"] > 0.9 and 0 < other["mean_difference"] < 0.1 for other in others)
    assert "| AWQ |" in capsys.readouterr().out
