"""A package may carry compiled kernels: a machine loads the best ones that it supports, and needs no compiler."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest
from hatchling.build import build_wheel

from cpp_kernels import compiler
from ops.cpp import prebuilt
from ops.cpp.build import COMMON_FLAGS, SOURCES
from ops.cpp.prebuilt import CROSS_COMPILERS, TARGETS, Target, best_target, compile_target, targets_of
from ops.machine import Machine
from server_process import serving

ROOT = Path(__file__).parents[3]
_BY_NAME = {target.name: target for target in TARGETS}
AVX2, AVX512, NEON = _BY_NAME["avx2"], _BY_NAME["avx512"], _BY_NAME["neon"]
X86 = Machine(processor="x86_64", cpu_flags=AVX512.needs, compiler="/usr/bin/c++")


def written(folder: Path, target: Target, content: bytes = b"kernels") -> Path:
    """A file that stands for the library of a target."""
    folder.mkdir(exist_ok=True)
    path = folder / target.file_name()
    path.write_bytes(content + hashlib.sha256(content).digest())
    return path


def test_the_best_target_of_a_processor_is_chosen() -> None:
    for target in TARGETS:
        assert best_target(target.machine, target.needs) == target
        assert best_target("riscv64", target.needs) is None
    assert best_target("x86_64", AVX512.needs - {"avx512vl"}) == AVX2
    assert best_target("x86_64", AVX2.needs - {"fma"}) is None


def test_the_best_library_that_is_there_is_found(tmp_path: Path) -> None:
    everything = frozenset().union(*(target.needs for target in TARGETS))
    assert prebuilt.find("x86_64", everything, tmp_path / "missing") is None
    simple = written(tmp_path, AVX2)
    assert prebuilt.find("x86_64", everything, tmp_path) == simple
    assert prebuilt.find("x86_64", everything, tmp_path) != written(tmp_path, AVX512)
    assert prebuilt.find("x86_64", everything, tmp_path) == tmp_path / AVX512.file_name()
    assert prebuilt.find("x86_64", AVX2.needs, tmp_path) == simple
    assert prebuilt.find("aarch64", everything, tmp_path) is None
    arm = written(tmp_path, NEON)
    assert prebuilt.find("aarch64", NEON.needs, tmp_path) == arm
    assert prebuilt.find("aarch64", NEON.needs - {"atomics"}, tmp_path) is None


def test_a_damaged_library_is_not_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, AVX2)
    path.write_bytes(path.read_bytes()[:-1])
    assert prebuilt.find("x86_64", AVX2.needs, tmp_path) is None


def test_libraries_of_other_sources_have_other_names(tmp_path: Path) -> None:
    (tmp_path / "kernels.cpp").write_text("int other;")
    assert AVX2.file_name(tmp_path) != AVX2.file_name()


def test_a_wheel_is_built_for_the_chosen_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_x86 = [target for target in TARGETS if target.machine == "x86_64"]
    assert targets_of("this", X86) == ([AVX512], X86.compiler)
    assert targets_of("all", X86) == targets_of("x86_64", X86) == (of_x86, X86.compiler)
    assert targets_of("none", X86) == ([], None)
    with pytest.raises(ValueError, match="must be one of 'this', 'all', 'none', 'aarch64', 'x86_64'"):
        targets_of("riscv64", X86)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler for aarch64 .*install the package g\+\+-aarch64"):
        targets_of("aarch64", X86)
    compiler = tmp_path / CROSS_COMPILERS["aarch64"]
    compiler.write_text("")
    compiler.chmod(0o755)
    assert targets_of("aarch64", X86) == ([NEON], compiler.name)
    with pytest.raises(ValueError, match="build the wheel on x86_64"):
        targets_of("x86_64", Machine(processor="aarch64", compiler="/usr/bin/c++"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_for_aarch64_compute_correctly_under_an_emulator(tmp_path: Path) -> None:
    cross, emulator = CROSS_COMPILERS["aarch64"], "qemu-aarch64-static"
    if shutil.which(cross) is None or shutil.which(emulator) is None:
        pytest.skip(f"{cross} or {emulator} is not installed")
    kernels = compile_target(NEON, cross, tmp_path)
    check = str(tmp_path / "check")
    program = Path(__file__).with_name("kernel_check.cpp")
    subprocess.run([cross, *COMMON_FLAGS, *NEON.flags, f"-I{SOURCES}", str(program), "-o", check, "-ldl"], check=True)
    ran = subprocess.run(
        [emulator, "-L", "/usr/aarch64-linux-gnu", check, str(kernels)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("product8_") == 6


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wheel_serves_in_cpp_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler()  # skips without one
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PENSTOCK_KERNELS", "this")
    wheel = tmp_path / build_wheel(str(tmp_path))
    machine = Machine.probe()
    assert wheel.name.endswith(f"-py3-none-linux_{machine.processor}.whl")
    installed = tmp_path / "installed"
    with ZipFile(wheel) as archive:
        archive.extractall(installed)
    target = best_target(machine.processor, machine.cpu_flags)
    assert target is not None

    program = ("-c", f"import sys; sys.path.insert(0, {str(installed)!r}); from serve.__main__ import main; main()")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {"PATH": str(empty), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(installed)}
    with serving(program=program, **environment) as server:
        kernels = httpx.get(f"{server.url}/get_server_info").text
        assert target.file_name() in kernels
        assert (
            httpx.post(
                f"{server.url}/generate", json={"text": "Hello", "sampling_params": {"max_new_tokens": 4}}, timeout=60
            ).status_code
            == 200
        )
    assert not list((tmp_path / "cache").rglob("*.so"))
