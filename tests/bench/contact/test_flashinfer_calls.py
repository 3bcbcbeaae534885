"""The comparison of FlashInfer's calls with its signatures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.contact import flashinfer_calls
from bench.contact.flashinfer_calls import calls, main, problems
from flashinfer_signatures import installed, signature

FILES = {
    "__init__.py": "from .decode import Wrapper as Renamed\nfrom .mla import *\n",
    "decode.py": """
class Wrapper:
    def __init__(self, buffer, layout="NHD", *, size=1): ...
    @overload
    def run(self, q): ...
    def run(self, q, pages, out=None): ...
    def plan(self, rows, *old, **more): return self._plan_impl(rows, *old, **more)
    def _plan_impl(self, rows, scale, window=-1): ...
""",
    "mla/__init__.py": "from ._core import *\n",
    "mla/_core.py": """
try:
    from ..decode import missing
except ImportError:
    pass
def decode(q, /, cache): ...
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("flashinfer.Renamed", "(self, buffer, layout=None, *, size=None)"),
        ("flashinfer.Renamed.run", "(self, q, pages, out=None)"),
        ("flashinfer.decode.Wrapper.plan", "(self, rows, scale, window=None)"),
        ("flashinfer.mla.decode", "(q, /, cache)"),
        ("flashinfer.decode", None),
        ("flashinfer.mla.missing", None),
        ("flashinfer.Renamed.absent", None),
    ],
)
def test_signatures_are_read_from_source(package: Path, name: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(LookupError, match="does not exist"):
            signature(package, name)
    else:
        assert str(signature(package, name)) == read


def test_calls_that_a_package_would_not_accept_are_named(package: Path) -> None:
    assert {problem.partition(":")[0] for problem in problems(package)} == {call.name for call in calls()}
    other = package / "other"
    other.mkdir()
    text = "def fast_decode_plan(self, indptr, indices, last_page_len, head_dim, scale, **more): ...\n"
    (other / "__init__.py").write_text(text, encoding="utf-8")
    found = [problem for problem in problems(other) if "fast_decode_plan" in problem]
    assert found == ["flashinfer.fast_decode_plan: missing a required argument: 'scale'"]


def test_the_installed_flashinfer_accepts_every_call() -> None:
    package = installed()
    if package is None:
        pytest.skip("flashinfer is not installed")
    assert problems(package) == []


def test_the_report_says_what_was_compared(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, status, told in ((None, 0, "not installed"), (package, 1, "would not be accepted")):
        monkeypatch.setattr(flashinfer_calls, "installed", lambda found=found: found)
        assert main() == status
        assert told in capsys.readouterr().out
