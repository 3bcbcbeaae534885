"""Every notebook runs from top to bottom in a fresh kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
QUICK = ("quickstart",)  # the others run in the slow pass


@pytest.mark.notebook
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow]) for path in NOTEBOOKS],
)
def test_notebook_runs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
