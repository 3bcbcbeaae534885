"""Compiling once; what goes wrong is said, and costs the kernels in C++ only."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ops.cpp import build as building
from ops.cpp.build import FLAGS, BuildError, build, library_path
from ops.select import select

Fake = Callable[[str], str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A compiler that does what the script says; $OUT is the file it is to write."""

    def write(script: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\nfor OUT; do :; done\n{script}\necho run >> "{tmp_path}/runs"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def test_the_second_time_nothing_is_compiled(fake: Fake, tmp_path: Path) -> None:
    compiler = fake('echo made > "$OUT"')
    path = build(compiler, ["avx2"])
    assert (path, path.read_text()) == (library_path(compiler, ["avx2"]), "made\n")
    assert build(compiler, ["avx2"]) == path
    assert runs(tmp_path) == len(building.UNITS) + 1
    assert list(path.parent.iterdir()) == [path]  # nothing else is left


def test_another_processor_compiler_flag_or_source_has_another_library(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake("")
    sources = tmp_path / "source"
    sources.mkdir()
    for source in building.SOURCES.iterdir():
        (sources / source.name).write_bytes(source.read_bytes())
    paths = {
        library_path(compiler, ["avx2"]),
        library_path(compiler, ["avx2", "fma"]),
        library_path("/bin/sh", ["avx2"]),
        library_path(compiler, ["avx2"], [*FLAGS, "-g"]),
    }
    monkeypatch.setattr(building, "SOURCES", sources)
    assert library_path(compiler, ["avx2"]) in paths
    (sources / "simd.h").write_text("// changed\n")
    paths.add(library_path(compiler, ["avx2"]))
    assert len(paths) == 5
    assert library_path(compiler, ["a", "b"]) == library_path(compiler, frozenset(["b", "a"]))


def test_several_may_compile_at_once(fake: Fake) -> None:
    compiler = fake('printf "the whole " > "$OUT"; sleep 0.05; printf library >> "$OUT"')
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build(compiler, ["avx2"]), range(4)))
    assert {path.read_text() for path in paths} == {"the whole library"}
    assert list(paths[0].parent.iterdir()) == [paths[0]]


def test_the_first_error_of_a_failing_compiler_is_told(fake: Fake) -> None:
    lines = "x.cpp: In function f:\\nx.cpp:3: error: no such thing\\nx.cpp:4: error: another"
    compiler = fake(f'echo half > "$OUT"; printf "{lines}" >&2; exit 1')
    with pytest.raises(BuildError, match=r"fails: x.cpp:3: error: no such thing$"):
        build(compiler, [])
    assert list(building.cache_directory().iterdir()) == []


@pytest.mark.parametrize("message", ["", "\\377\\376 killed"])
def test_a_compiler_that_says_little_is_told_too(fake: Fake, message: str) -> None:
    with pytest.raises(BuildError, match="fails: "):
        build(fake(f"printf '{message}' >&2; exit 1"), [])


def test_a_compiler_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be run"):
        build(str(tmp_path / "nothing"), [])


def test_a_compiler_that_takes_too_long_is_ended(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "TIMEOUT_S", 0.1)
    with pytest.raises(BuildError, match="timed out"):
        build(fake("exec sleep 60"), [])


def test_a_compiler_that_writes_nothing_is_told(fake: Fake) -> None:
    with pytest.raises(BuildError, match="wrote no library"):
        build(fake(""), [])


def test_without_a_cache_the_library_is_made_elsewhere(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    compiler = fake('echo made > "$OUT"')
    first, second = build(compiler, []), build(compiler, [])
    assert first.read_text() == second.read_text() == "made\n"
    assert first != second
    for path in (first, second):
        path.unlink()
        path.parent.rmdir()


def test_a_user_without_a_home_gets_a_library(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    path = build(fake('echo made > "$OUT"'), [])
    assert path.read_text() == "made\n"
    path.unlink()


def test_a_library_that_cannot_be_loaded_is_told(fake: Fake) -> None:
    compiler = fake('echo "no library" > "$OUT"')
    with pytest.raises(BuildError, match="cannot be loaded"):
        select({"norm": "with_cpp"}, {"with_cpp": {"compiler": compiler}})


def test_without_a_compiler_kernels_in_cpp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        select({"norm": "with_cpp"})


@pytest.mark.slow
def test_sources_give_no_warnings(tmp_path: Path) -> None:
    from ops.machine import Machine

    compiler = Machine.probe().compiler
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = [flag for flag in FLAGS if flag != "-O3"]
    for source, *own in building.UNITS:
        command = [
            compiler,
            *flags,
            *own,
            "-fsyntax-only",
            "-Wall",
            "-Wextra",
            str(building.SOURCES / source),
        ]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_every_source_is_compiled() -> None:
    assert {source for source, *_ in building.UNITS} == {path.name for path in building.SOURCES.glob("*.cpp")}
