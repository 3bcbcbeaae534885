"""Compilation happens once. Errors are reported, and disable only the C++ kernels."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import monotonic, sleep

import pytest

from cpp_kernels import compiler, library
from ops.cpp import build as building
from ops.cpp.build import DIGEST_BYTES, FLAGS, BuildError, Lifeline, build, library_path
from ops.cpp.library import load
from ops.machine import Machine, cache_folder
from ops.select import select

Fake = Callable[[str], str]


@pytest.fixture(scope="module")
def real() -> Path:
    """Return the kernels' library, compiled before the cache is redirected."""
    return library().path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Return a compiler that runs the script. $OUT is its output file."""

    def write(script: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\nfor OUT; do :; done\n{script}\necho run >> "{tmp_path}/runs"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def compiled(path: Path) -> str:
    """Return the compiler's output."""
    return path.read_bytes()[:-DIGEST_BYTES].decode()


def libraries() -> list[Path]:
    """Return all files in the cache except the lock."""
    return [path for path in cache_folder("cpp").iterdir() if path.name != "lock"]


def test_a_build_says_what_it_does_and_how_far_it_is(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    compiler = fake('echo "library" > "$OUT"')
    with caplog.at_level("INFO", "penstock.kernels"), Lifeline() as lifeline:
        build(compiler, [], FLAGS, lifeline)
        assert lifeline.build_s > 0
    first, *progress, last = caplog.messages
    assert first.startswith("Compiling CPU kernels for this processor, once: about 20 s")
    number = len(building.UNITS)
    assert [text.split(": ")[1] for text in progress] == [
        f"{done} of {number} files are done." for done in range(1, number + 1)
    ]
    assert last.startswith("Compiled CPU kernels in")
    caplog.clear()
    with Lifeline() as lifeline:
        build(compiler, [], FLAGS, lifeline)
        assert lifeline.build_s == 0
    assert not caplog.messages


def test_a_terminal_shows_a_bar(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build(fake('echo "library" > "$OUT"'), [])
    shown = capsys.readouterr().err
    assert f"Compiling CPU kernels:   0%|          | 0/{len(building.UNITS)}" in shown
    assert shown.endswith("\r")  # the bar is removed at its end


def test_a_log_file_shows_no_bar(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # an earlier test may have imported it
    build(fake('echo "library" > "$OUT"'), [])
    assert capsys.readouterr().err == ""


def test_the_second_time_nothing_is_compiled(fake: Fake, tmp_path: Path) -> None:
    compiler = fake('echo made > "$OUT"')
    path = build(compiler, ["avx2"])
    assert (path, compiled(path)) == (library_path(compiler, ["avx2"]), "made\n")
    assert build(compiler, ["avx2"]) == path
    assert runs(tmp_path) == len(building.UNITS) + 1
    assert libraries() == [path]


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
    os.utime(compiler, ns=(0, 0))  # a different time, like another version of the compiler
    paths.add(library_path(compiler, ["avx2"]))
    assert len(paths) == 6
    assert library_path(compiler, ["a", "b"]) == library_path(compiler, frozenset(["b", "a"]))


def test_tests_load_the_library_that_an_engine_loads(real: Path) -> None:
    machine = Machine.probe()
    assert machine.compiler is not None
    assert real.name == library_path(machine.compiler, machine.cpu_flags).name


def test_of_several_processes_one_compiles(fake: Fake, tmp_path: Path) -> None:
    compiler = fake('printf "the whole " > "$OUT"; sleep 0.05; printf library >> "$OUT"')
    script = f"from ops.cpp.build import build; print(build({compiler!r}, ['avx2']))"
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0] for process in processes}
    assert paths == {f"{library_path(compiler, ['avx2'])}\n"}
    assert runs(tmp_path) == len(building.UNITS) + 1
    assert [compiled(path) for path in libraries()] == ["the whole library"]


def test_a_failed_build_is_tried_again_one_unit_at_a_time(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    alone = f'mkdir "{tmp_path}/busy" 2> /dev/null || {{ echo "error: Killed" >&2; exit 1; }}'
    compiler = fake(f'{alone}\nsleep 0.05\nrmdir "{tmp_path}/busy"\necho made > "$OUT"')
    assert compiled(build(compiler, [])) == "made\n"
    assert "one unit at a time" in caplog.text
    assert "Killed" in caplog.text


def test_a_build_that_fails_twice_has_failed(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BuildError):
        build(fake("exit 1"), [])
    assert caplog.text.count("one unit at a time") == 1


def test_sources_that_change_meanwhile_are_not_mixed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "source"
    sources.mkdir()
    for name in building.UNITS:
        (sources / name).write_text("old ")
    monkeypatch.setattr(building, "SOURCES", sources)
    change = f'for file in "{sources}"/*.cpp; do printf "new " > "$file"; done'
    link = 'for file; do case "$file" in *.o) cat "$file" >> "$OUT";; esac; done'
    unit = 'for file; do case "$file" in *.cpp) cp "$file" "$OUT";; esac; done'
    compiler = fake(f'case "$*" in *-shared*) {link};; *) {change}; {unit};; esac')
    before = library_path(compiler, [])
    assert build(compiler, []) == before
    assert compiled(before) == "old " * len(building.UNITS)
    assert library_path(compiler, []) != before


@pytest.mark.parametrize("kept", [0, 10, 100, -1])
def test_a_library_of_which_a_part_is_missing_is_compiled_again(fake: Fake, tmp_path: Path, kept: int) -> None:
    compiler = fake(f'echo "{"x" * 200}" > "$OUT"')
    path = build(compiler, [])
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert build(compiler, []) == path
    assert path.read_bytes() == whole
    assert runs(tmp_path) == 2 * (len(building.UNITS) + 1)


@pytest.mark.parametrize("place", [0, 100, -DIGEST_BYTES])
def test_a_library_with_zeros_in_it_is_compiled_again(fake: Fake, tmp_path: Path, place: int) -> None:
    compiler = fake(f'echo "{"x" * 200}" > "$OUT"')
    path = build(compiler, [])
    whole = path.read_bytes()
    at = place % len(whole)
    path.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    assert build(compiler, []).read_bytes() == whole
    assert runs(tmp_path) == 2 * (len(building.UNITS) + 1)


def test_a_library_with_a_flipped_bit_is_compiled_again(fake: Fake, real: Path) -> None:
    compiler = fake(f'cp "{real}" "$OUT"')
    path = build(compiler, [])
    whole = path.read_bytes()
    generator = Random(0)
    for _ in range(3):
        bit = generator.randrange(8 * len(whole))
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        assert build(compiler, []).read_bytes() == whole


def test_a_library_that_cannot_be_loaded_is_compiled_again(fake: Fake, tmp_path: Path, real: Path) -> None:
    compiler = fake(f'cp "{real}" "$OUT"')
    wrong = b"no library"
    path = library_path(compiler, [])
    path.parent.mkdir(parents=True)
    path.write_bytes(wrong + hashlib.sha256(wrong).digest())
    assert load(compiler, []).path == path
    assert runs(tmp_path) == len(building.UNITS) + 1


def test_the_first_error_of_a_failing_compiler_is_told(fake: Fake) -> None:
    lines = "x.cpp: In function f:\\nx.cpp:3: error: no such thing\\nx.cpp:4: error: another"
    compiler = fake(f'echo half > "$OUT"; printf "{lines}" >&2; exit 1')
    with pytest.raises(BuildError, match=r"failed: x.cpp:3: error: no such thing$"):
        build(compiler, [])
    assert libraries() == []


@pytest.mark.parametrize("message", ["", "\\377\\376 killed"])
def test_a_compiler_that_says_little_is_told_too(fake: Fake, message: str) -> None:
    with pytest.raises(BuildError, match="failed: "):
        build(fake(f"printf '{message}' >&2; exit 1"), [])


def test_a_compiler_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="Cannot run"):
        build(str(tmp_path / "nothing"), [])


def test_a_compiler_that_takes_too_long_is_ended(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "TIMEOUT_S", 0.1)
    with pytest.raises(BuildError, match="timed out"):
        build(fake(f'sleep 60 & echo $! > "{tmp_path}/started"; wait'), [])
    started = Path(f"/proc/{(tmp_path / 'started').read_text().strip()}/stat")
    until = monotonic() + 10
    while is_running(started) and monotonic() < until:  # a killed process ends a moment later
        sleep(0.01)
    assert not is_running(started)  # the compiler's child process has ended too


def begun(fake: Fake, tmp_path: Path) -> tuple[str, Path]:
    """Return a compiler that never ends, and the file to which it writes its process id."""
    pid = tmp_path / "started"
    return fake(f'sleep 60 & echo $! > "{pid}.new"; mv "{pid}.new" "{pid}"; wait'), pid


def wait_for(condition: Callable[[], bool]) -> None:
    until = monotonic() + 10
    while not condition() and monotonic() < until:
        sleep(0.01)
    assert condition()


def test_compilers_end_with_a_killed_process_and_the_next_build_removes_their_folder(
    fake: Fake, tmp_path: Path
) -> None:
    compiler, pid = begun(fake, tmp_path)
    script = f"from ops.cpp.build import build; build({compiler!r}, [])"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(pid.exists)
        process.kill()
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_for(lambda: not is_running(state))
    [scratch] = libraries()
    assert scratch.is_dir()
    path = build(fake('echo made > "$OUT"'), [])
    assert libraries() == [path]


@pytest.mark.parametrize("waits", [False, True])
def test_a_build_whose_lifeline_is_cut_ends(fake: Fake, tmp_path: Path, waits: bool) -> None:
    compiler, pid = begun(fake, tmp_path)
    with building.Lifeline() as lifeline, building.Lifeline() as other, ThreadPoolExecutor(2) as threads:
        first = threads.submit(build, compiler, [], lifeline=lifeline)
        wait_for(pid.exists)
        second = threads.submit(build, compiler, [], lifeline=other)  # waits for the first
        stopped, left = ((other, second), (lifeline, first)) if waits else ((lifeline, first), (other, second))
        stopped[0].cut()
        with pytest.raises(building.BuildStopped):
            stopped[1].result(timeout=5)
        assert not left[1].done()
        left[0].cut()
    assert libraries() == []


def is_running(state: Path) -> bool:
    """Whether the process with this status file is running."""
    try:
        return ") Z " not in state.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_compiler_that_writes_nothing_is_told(fake: Fake) -> None:
    with pytest.raises(BuildError, match="did not write a library"):
        build(fake(""), [])


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the cache read-only, and return the folder that replaces it."""
    (tmp_path / "cache").write_text("a file where a directory should be")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary" / f"penstock-kernels-{os.getuid()}"


def test_without_a_cache_one_folder_is_kept_instead(
    fake: Fake, tmp_path: Path, no_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = fake('echo made > "$OUT"')
    first, second = build(compiler, []), build(compiler, [])
    assert first == second
    assert compiled(first) == "made\n"
    assert runs(tmp_path) == len(building.UNITS) + 1
    assert "XDG_CACHE_HOME" in caplog.text
    assert list((tmp_path / "temporary").iterdir()) == [no_cache]
    assert {path.name for path in no_cache.iterdir()} == {first.name, "lock"}
    assert stat.S_IMODE(no_cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("held", ["writable by all", "a link", "a file"])
def test_a_folder_that_others_may_write_is_not_loaded_from(
    fake: Fake, tmp_path: Path, no_cache: Path, held: str
) -> None:
    if held == "writable by all":
        no_cache.mkdir()
        no_cache.chmod(0o777)
    elif held == "a link":
        (tmp_path / "elsewhere").mkdir()
        no_cache.symlink_to(tmp_path / "elsewhere")
    else:
        no_cache.write_text("")
    with pytest.raises(BuildError, match=r"other users may write|Cannot write"):
        build(fake('echo made > "$OUT"'), [])


def test_a_user_without_a_home_gets_a_library(fake: Fake, no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    path = build(fake('echo made > "$OUT"'), [])
    assert compiled(path) == "made\n"
    assert path.parent == no_cache


def test_a_library_that_cannot_be_loaded_is_told(fake: Fake) -> None:
    compiler = fake('echo "no library" > "$OUT"')
    with pytest.raises(BuildError, match="Cannot load"):
        select({"norm": "with_cpp"}, {"with_cpp": {"compiler": compiler}})


def test_without_a_compiler_kernels_in_cpp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(BuildError, match=r"No C\+\+ compiler"):
        select({"norm": "with_cpp"})


@pytest.mark.slow
def test_sources_give_no_warnings(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if flag != "-O3"]
    for unit in building.UNITS:
        command = [compiler(), *flags, "-fsyntax-only", "-Wall", "-Wextra", str(building.SOURCES / unit)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_every_source_is_compiled() -> None:
    assert set(building.UNITS) == {path.name for path in building.SOURCES.glob("*.cpp")}
