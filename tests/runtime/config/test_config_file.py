"""Options from a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.config import Args
from runtime.errors import ConfigurationError

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "options.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusals(path: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Args.parse(["--config", path])
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        ("page-size: 4", "page_size", 4),
        ("page_size: 4", "page_size", 4),
        ("--page-size: 4", "page_size", 4),
        ("port: '8000'", "port", 8000),
        ("disable-radix-cache: true", "disable_radix_cache", True),
        ("disable-radix-cache: false", "disable_radix_cache", False),
        ("enable_mixed_chunk: false", "enable_mixed_chunk", False),
        ("no-enable-mixed-chunk: true", "enable_mixed_chunk", False),
        ("cuda-graph-bs: [1, 2]", "cuda_graph_bs", (1, 2)),
        ("lora-paths: [{lora_name: a}]", "lora_paths", ('{"lora_name": "a"}',)),
        ("json-model-override-args: {a: {b: 1}}", "json_model_override_args", {"a": {"b": 1}}),
        ("served-model-name: 2024", "served_model_name", "2024"),
        ("grammar-backend: none", "grammar_backend", "none"),
        ("disaggregation-mode: null", "disaggregation_mode", "null"),
        ("watchdog-timeout: 1e-1", "watchdog_timeout", 0.1),
    ],
)
def test_entry_is_read(write: Write, entry: str, name: str, value: object) -> None:
    assert Args.parse(["--config", write(entry)]).get(name) == value


def test_command_line_wins_over_the_file(write: Write) -> None:
    path = write("port: 1\nhost: 0.0.0.0\n")
    for args in (Args.parse(["--port", "2", "--config", path]), Args.of(config=path, port=2)):
        assert (args.http.port, args.http.host) == (2, "0.0.0.0")
        assert args.explicitly_set == {"config", "port", "host"}
        assert Args.of(**args.keywords()) == args


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [", "is not valid YAML (line 1)"),
        ("page-sze: 3", "page-sze is not an option; did you mean --page-size?"),
        ("port: true", "put 'true' in quotes"),
        ("port: x", "--port must be a whole number, not 'x'."),
        ("port: 1\nport: 2", "--port is set twice."),
        ("page-size: 1\npage_size: 2", "--page-size is set twice."),
        ("config: other.yaml", "--config cannot stand inside a configuration file."),
        ("model: !!python/object/apply:os.getcwd []", "is not valid YAML (line 1)"),
    ],
)
def test_mistake_is_explained(write: Write, text: str, sentence: str) -> None:
    assert sentence in refusals(write(text))


def test_mistakes_of_file_and_command_line_are_said_together(write: Write) -> None:
    path = write("port: x\npage-sze: 1\n")
    with pytest.raises(ConfigurationError) as caught:
        Args.parse(["--config", path, "--dtype", "int3"])
    assert len(caught.value.refusals) == 3


def test_other_endings_and_missing_files_are_refused(write: Write, tmp_path: Path) -> None:
    assert ".yaml or .yml" in refusals(write("port: 1", "options.json"))
    assert "cannot be read" in refusals(str(tmp_path / "none.yaml"))


def test_empty_file_says_nothing(write: Write) -> None:
    assert Args.parse(["--config", write("# nothing\n", "o.yml")]).explicitly_set == {"config"}


def test_config_is_given_once(write: Write) -> None:
    path = write("port: 1")
    with pytest.raises(ConfigurationError, match="only once"):
        Args.parse(["--config", path, "--config", path])
