"""The commands that wear and flood an engine run and see what they are for; the short forms."""

from __future__ import annotations

import pytest

from bench import overload, soak


def test_the_slope_is_that_of_the_line() -> None:
    samples = [(x, 5.0 + 0.25 * x) for x in range(0, 100, 7)]
    assert soak._slope(samples) == pytest.approx(0.25)
    assert soak._slope([(1, 5.0)]) == 0


@pytest.mark.slow
def test_nothing_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--requests", "400"])
    said = capsys.readouterr().out
    assert "pages exact: True" in said
    before, after = said.split("descriptors: ")[1].split(";")[0].split(" -> ")
    assert before == after


@pytest.mark.slow
def test_what_is_too_much_is_refused_and_the_rest_answered(capsys: pytest.CaptureFixture[str]) -> None:
    overload.main(["--seconds", "3", "--running", "4"])
    said = capsys.readouterr().out
    assert "refused 0" not in said
    assert "Retry-After up to 0 s" not in said
