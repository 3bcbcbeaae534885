"""What is installed: the server, the engine, the kernels, the demo model and the chat page, and nothing else."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[1]
PACKAGES = {"serve", "runtime", "ops"}
DEVELOPERS_CODE = ('"pip"', "import venv", "torch.optim", ".backward(")  # installs packages, or trains


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the wheel by name, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where a build backend is called
        patch.setenv("PENSTOCK_KERNELS", "none")  # tests/ops/cpp/test_prebuilt.py builds a wheel with kernels
        name = build_wheel(str(folder))
    with ZipFile(folder / name) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def inside(wheel: dict[str, bytes], folder: str) -> set[str]:
    return {name.removeprefix(folder) for name in wheel if name.startswith(folder)}


def on_disk(folder: str, pattern: str = "*") -> set[str]:
    """The files below a folder that a clean checkout has."""
    found = (path for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {str(path.relative_to(ROOT / folder)) for path in found if path.parent.name != "__pycache__"}


def test_it_holds_the_three_packages_and_its_own_description(wheel: dict[str, bytes]) -> None:
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {*PACKAGES, "penstock"}
    assert len(top - PACKAGES) == 2


def test_it_holds_no_tests(wheel: dict[str, bytes]) -> None:
    parts = {part for name in wheel for part in name.split("/")}
    assert not [part for part in parts if part in ("tests", "conftest.py") or part.startswith("test_")]


def test_it_measures_servers_and_the_engine_and_compares_with_nobody(wheel: dict[str, bytes]) -> None:
    assert inside(wheel, "serve/bench/") == {
        "__init__.py",
        "__main__.py",
        "client.py",
        "latency.py",
        "load.py",
        "metrics.py",
        "offline.py",
        "options.py",
        "protocol.py",
        "report.py",
        "serving.py",
        "workload.py",
    }


def test_the_demo_model_comes_without_its_training(wheel: dict[str, bytes]) -> None:
    assert inside(wheel, "serve/demo/") == {
        "__init__.py",
        "weights/config.json",
        "weights/draft_head/config.json",
        "weights/draft_head/model.safetensors",
        "weights/generation_config.json",
        "weights/model.safetensors",
        "weights/tokenizer.json",
        "weights/tokenizer_config.json",
    }


@pytest.mark.parametrize("text", DEVELOPERS_CODE)
def test_nothing_in_it_installs_packages_or_trains(wheel: dict[str, bytes], text: str) -> None:
    assert not [name for name, content in wheel.items() if name.endswith(".py") and text.encode() in content]


def test_the_chat_page_and_the_kernels_sources_are_in_it(wheel: dict[str, bytes]) -> None:
    assert inside(wheel, "serve/page/") == on_disk("serve/page")
    assert {"chat.html", "chat.css", "chat.js"} <= inside(wheel, "serve/page/")
    assert inside(wheel, "ops/cpp/source/") == on_disk("ops/cpp/source")
    assert "kernels.cpp" in inside(wheel, "ops/cpp/source/")


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_module_is_in_it(wheel: dict[str, bytes], package: str) -> None:
    assert {name for name in inside(wheel, f"{package}/") if name.endswith(".py")} == {
        name
        for name in on_disk(package, "*.py")
        if not name.startswith("alias/")  # the module `penstock` itself
    }


def test_the_command_is_installed(wheel: dict[str, bytes]) -> None:
    (entry_points,) = (content for name, content in wheel.items() if name.endswith("/entry_points.txt"))
    assert "penstock = serve.__main__:main" in entry_points.decode()
