from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu.engines import SCRIPTS, TESTS
from bench.cpu.process import Runner
from bench.cpu.work import WorkError

# A runner script like those of peers, whose model counts up from the prompt's last id.
SCRIPT = """
import os, sys
import answering

class Counting:
    def __init__(self, options):
        print("something to stdout")
        if options.model == "broken":
            raise ValueError("no such model")
    def generate(self, prompts, new_tokens):
        if prompts[0] == [13]:
            raise MemoryError("too much")
        if prompts[0] == [14]:
            new_tokens -= 1
        return [[ids[-1] + 1 + i for i in range(new_tokens)] for ids in prompts]

def server_command(options, port):
    return [sys.executable, "-c", '''
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
''', str(port)]

answering.main(("pytest",), lambda options: None, Counting, server_command)
"""


def runner(tmp_path: Path, *more: str, model: str = "m") -> Runner:
    script = tmp_path / "run_counting.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "run", "--model", model, "--weights", "bf16", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    return Runner("counting", [*command, *more], environment, tmp_path / "log")


@pytest.fixture
def counting(tmp_path: Path):
    one = runner(tmp_path)
    one.start()
    yield one
    one.stop()


def test_a_runner_answers_jobs_whatever_its_engine_prints(counting: Runner) -> None:
    answer = counting.ask({"prompts": [[5, 6], [8]], "new_tokens": 3})
    assert answer["ids"] == [7, 8, 9]
    assert answer["output_lengths"] == [3, 3]
    assert counting.generate([[5]], 2) >= 0
    assert counting.versions["pytest"] == pytest.__version__


def test_a_failing_engine_ends_with_its_last_words(counting: Runner) -> None:
    with pytest.raises(WorkError, match="too much"):
        counting.generate([[13]], 2)
    with pytest.raises(WorkError, match="not running"):
        counting.generate([[5]], 2)


def test_too_few_tokens_are_an_error(counting: Runner) -> None:
    with pytest.raises(WorkError, match="did not give 3 tokens"):
        counting.generate([[14]], 3)


def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="no such model"):
        runner(tmp_path, model="broken").start()


def test_a_runner_can_stand_still_and_go_on(counting: Runner) -> None:
    process = counting._process
    assert process is not None
    counting.pause()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    counting.resume()
    assert counting.generate([[5]], 1) >= 0


def test_memory_and_processor_time_are_those_of_its_processes(counting: Runner) -> None:
    assert 2**20 < counting.peak_bytes() < 2**30
    assert 0 < counting.cpu_s() < 60


def test_a_stopped_runner_leaves_nothing_behind(counting: Runner) -> None:
    process = counting._process
    assert process is not None
    counting.pause()
    counting.stop()
    assert process.returncode == 0
    assert counting.cpu_s() == 0


def test_a_server_says_where_it_is_and_ends_with_its_runner(tmp_path: Path) -> None:
    one = runner(tmp_path, "--serve")
    one.start()
    assert one.url is not None
    assert one.url.startswith("http://127.0.0.1:")
    process = one._process
    assert process is not None
    group = process.pid
    one.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_runner_that_stands_still_ends_when_its_driver_is_killed(tmp_path: Path) -> None:
    runner(tmp_path)  # writes the script
    driver = f"""
import os, signal
from pathlib import Path
from bench.cpu.process import Runner
command = {[sys.executable, str(tmp_path / "run_counting.py"), "run", "--model", "m"]!r}
one = Runner("a", [*command, "--weights", "bf16", "--threads", "1"], os.environ, Path({str(tmp_path / "log")!r}))
one.start()
one.pause()
os.waitid(os.P_PID, one._process.pid, os.WSTOPPED | os.WNOWAIT)
print(one._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = [str(SCRIPTS), str(TESTS), str(TESTS.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", driver], env=environment, capture_output=True, check=False)
    pid = int(done.stdout)
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    """Wait until the process has ended, which makes its file descriptor readable."""
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 20)[0]
    finally:
        os.close(handle)
