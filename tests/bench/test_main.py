"""The command line of the studies: each command is there, and says its options under the name it is run by."""

from __future__ import annotations

import pytest

from bench.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_study_says_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: just study {name} ")


def test_help_lists_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("commands:\n")
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
    assert main(["serving"]) == 2
