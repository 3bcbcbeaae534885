"""The examples in docs/python.md run unchanged, one after another."""

from __future__ import annotations

import ast
import re
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs/python.md"


async def test_every_example_runs_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    text = PAGE.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        code = compile(
            "\n" * text.count("\n", 0, found.start(1)) + found[1],
            str(PAGE),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        )
        running = eval(code, names)
        if isawaitable(running):
            await running
        assert capsys.readouterr().out.strip(), found[1]
