"""Folders of killed engines are removed, and those of living engines are kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtime.distributed.rendezvous_folder import RendezvousFolder

SCRIPT = """
import os
from runtime.distributed.rendezvous_folder import RendezvousFolder
folder = RendezvousFolder()
open(folder.store, "w").close()
os.kill(os.getpid(), 9)
"""


def test_folder_of_a_killed_engine_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "penstock-other").mkdir()  # a folder without a lock is not ours
    subprocess.run([sys.executable, "-c", SCRIPT], check=False)
    [left] = tmp_path.glob("penstock-*/store")
    folder, second = RendezvousFolder(), RendezvousFolder()
    assert not left.parent.exists()
    assert {str(path.parent) for path in tmp_path.glob("*/lock")} == {
        str(Path(each.store).parent) for each in (folder, second)
    }
    folder.remove()
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["penstock-other"]
