from __future__ import annotations

import sys

import pytest

from ops.progress import progress_bar


def test_without_tqdm_no_bar_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as in the environment in which a wheel is built
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar(5, "Compiling", unit="file") as bar:
        assert bar is None
