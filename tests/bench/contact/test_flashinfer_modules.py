"""The compilation of FlashInfer's modules, with a module and a ninja of the test's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.contact import flashinfer_modules
from bench.contact.flashinfer_modules import main, missing
from runtime.errors import ConfigurationError

NINJA = "rule cc\n  command = true\nbuild a.o: cc a.cu\nbuild b.o: cc b.cu\nbuild all.so: cc a.o b.o\n"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which the test's ninja writes its arguments."""
    called, ninja = tmp_path / "called", tmp_path / "ninja"
    ninja.write_text(f'#!/bin/sh\necho "$@" >> {called}\n', encoding="utf-8")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    return called


def test_objects_of_a_module_are_compiled(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = commands.with_name("build.ninja")
    module = SimpleNamespace(
        write_ninja=lambda: file.write_text(NINJA, encoding="utf-8"), ninja_path=file, build_dir=file.parent
    )
    monkeypatch.setattr(flashinfer_modules, "MODULES", {"one": lambda: module})
    monkeypatch.setattr(flashinfer_modules, "missing", lambda home, modules: [])
    assert main([]) == 0
    assert commands.read_text(encoding="utf-8").split()[-4:] == ["-j", "1", "a.o", "b.o"]
    for parts, status, compiled in ((("b",), 0, ["b.o"]), (("b", "c"), 1, ["b.o"])):
        monkeypatch.setattr(flashinfer_modules, "OBJECTS", {"one": parts})
        assert main([]) == status
        assert commands.read_text(encoding="utf-8").split()[-2:] == ["1", *compiled]
    monkeypatch.setattr(flashinfer_modules, "OBJECTS", {})
    commands.with_name("ninja").write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    assert main(["one"]) == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_modules, "find_spec", lambda name: None)
    monkeypatch.setattr(flashinfer_modules.shutil, "which", lambda name: None)
    assert len(missing(Path("/cuda"), ["decode"])) == 3
    assert "cublasLt.h and nvrtc.h in /cuda for products" in missing(Path("/cuda"), ["products"])[2]
    monkeypatch.setattr(flashinfer_modules, "cuda_home", lambda: None)
    with pytest.raises(ConfigurationError, match=r"the package flashinfer-python.*nvcc \(set CUDA_HOME.*ninja"):
        main([])
    with pytest.raises(ConfigurationError, match="Unknown module other"):
        main(["other"])
