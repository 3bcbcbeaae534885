"""Clients in separate environments, each created once by pip or npm.

The environments of `test_evaluations.py` take minutes to install, so they are kept in the user's cache folder. The
tests are skipped with a reason if a registry cannot be reached.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from ops.machine import cache_folder

NODE_CLIENTS = ("openai@6", "ai@6", "@ai-sdk/openai-compatible@2", "zod@4")
INSTALL_TIMEOUT_S = 900


@pytest.fixture(scope="session")
def made_pythons() -> dict[str, Path]:
    """Return the interpreters created so far, by their packages."""
    return {}


@pytest.fixture
def client_python(request: pytest.FixtureRequest, tmp_path: Path, made_pythons: dict[str, Path]) -> Path:
    """Return an interpreter with the packages that the test names. Tests with the same packages share it."""
    if request.param not in made_pythons:
        _install([sys.executable, "-m", "venv", str(tmp_path)], tmp_path)
        python = tmp_path / "bin" / "python"
        _install([str(python), "-m", "pip", "install", "--quiet", *request.param.split()], tmp_path)
        made_pythons[request.param] = python
    return made_pythons[request.param]


@pytest.fixture
def kept_python(request: pytest.FixtureRequest) -> Path:
    """Like `client_python`, but kept for later runs in a cache folder that is named after the packages."""
    folder = cache_folder("clients") / sha256(f"{sys.version} {request.param}".encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _install([sys.executable, "-m", "venv", "--clear", str(folder)], Path.cwd())
        for packages in request.param.split(" then "):
            _install([str(python), "-m", "pip", "install", "--quiet", *packages.split()], folder)
        (folder / "complete").touch()
    return python


@pytest.fixture(scope="session")
def client_node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose `node_modules` scripts for Node can use."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node-clients")
    _install(["npm", "install", "--silent", "--no-fund", "--no-audit", *NODE_CLIENTS], folder)
    return folder


def _install(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} did not install the clients in {INSTALL_TIMEOUT_S} s")
    if done.returncode:
        pytest.skip(f"the clients could not be installed: {done.stderr.strip()[-500:]}")


@pytest.fixture
def npm_program(request: pytest.FixtureRequest) -> Path:
    """Return a program of an npm package, named package@version:program. It is kept in the user's cache folder."""
    package, _, program = request.param.rpartition(":")
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip(f"{package} needs npm and node")
    folder = cache_folder("clients") / sha256(package.encode()).hexdigest()[:16]
    found = folder / "node_modules" / ".bin" / program
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        _install(["npm", "install", "--no-fund", "--no-audit", package], folder)
        _install(["npm", "rebuild", "--no-fund"], folder)  # runs the package's own script, which fetches its program
        (folder / "complete").touch()
    return found
