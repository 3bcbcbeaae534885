from __future__ import annotations

import io

import pytest

from serve.bench.load import Progress
from serve.bench.metrics import summarize
from serve.bench.report import SECRET, document, plain, table, without_secrets


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "k", "--seed", "1"], ["--api-key", SECRET, "--seed", "1"]),
        (["--api-key=k"], [f"--api-key={SECRET}"]),
        (["--header", "A=k"], ["--header", SECRET]),
        (["--header=A=k"], [f"--header={SECRET}"]),
        (["--model=k"], ["--model=k"]),
    ],
)
def test_secrets_are_struck_out(argv: list[str], shown: list[str]) -> None:
    assert without_secrets(argv) == shown


def test_no_setting_of_a_document_is_a_secret() -> None:
    settings = {"api_key": "k", "header": ["A=k"], "engine": {"api_key": "k", "page_size": 16}}
    content = document("offline", settings, {}, argv=["--api-key", "k"])
    assert content["settings"] == {"engine": {"page_size": 16}}
    assert content["command"].endswith("offline --api-key '***'")


def test_distributions_become_objects() -> None:
    assert plain({"a": [summarize([1.0])]})["a"][0]["median"] == 1.0  # type: ignore[index]


def test_table_leaves_out_what_is_not_known() -> None:
    text = table("run", [("known", 1234), ("unknown", None)], {"there": summarize([2.0]), "not": None})
    assert "1,234" in text
    assert "unknown" not in text
    assert "not" not in text.split()
    assert "2.00" in text


def test_progress_draws_on_a_terminal_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(2, "requests", stream) as progress:
            progress.advance()
            progress.advance()
    assert "2/2" in terminal.getvalue()
    assert pipe.getvalue() == ""
