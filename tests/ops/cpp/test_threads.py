"""Threads that sleep between two pieces of work are woken."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ops.cpp.build import SOURCES
from ops.machine import Machine

# Runs so many rounds of kernels that take a different time on each thread, and prints how often one was called.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "pool.h"
using namespace penstock;

std::atomic<int64_t> calls{0};

void work(const void*, const Step&, ThreadGroup& threads) {
    for (int64_t left = (calls.fetch_add(1) * 7 + threads.rank * 37) % 60; left > 0; left--) asm volatile("");
}

int main(int, char** arguments) {
    const int size = atoi(arguments[1]), rounds = atoi(arguments[2]);
    Pool pool(size);
    GraphNode nodes[8];
    for (auto& node : nodes) node = {work, nullptr};
    const Step step{};
    for (int round = 0; round < rounds; round++) pool.run(nodes, 1 + round % 8, &step);
    printf("%lld", (long long)calls.load());
}
"""


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in which threads sleep at once where they would look for a while."""
    compiler = Machine.probe().compiler
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sleepers")
    (folder / "program.cpp").write_text(PROGRAM)
    replaced = 0
    for header in ("pool.h", "thread_group.h", "step.h"):
        text, count = re.subn(r"(constexpr int \w*SPINS) = \d+;", r"\1 = 0;", (SOURCES / header).read_text())
        (folder / header).write_text(text)
        replaced += count
    assert replaced == 2
    program = folder / "program"
    command = [compiler, "-std=c++20", "-O2", "-pthread", str(folder / "program.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_sleeping_threads_do_all_rounds(sleepers: Path, num_threads: int) -> None:
    rounds = 10_000
    done = subprocess.run(
        [sleepers, str(num_threads), str(rounds)], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(done.stdout) == num_threads * sum(1 + i % 8 for i in range(rounds))


def test_what_wakes_sleepers_is_written_in_the_one_order_of_all_threads() -> None:
    """A weaker store may become visible after `notify_all` has looked for sleepers and seen none.

    That cannot be provoked: on x86 it would take a store that is delayed for longer than a thread needs to sleep.
    """
    written = []
    for header in ("pool.h", "thread_group.h"):
        lines = (SOURCES / header).read_text().splitlines()
        written += [lines[i - 1] for i, line in enumerate(lines) if "notify_all();" in line]
    assert len(written) == 2
    for line in written:
        assert re.search(r"\.(store|fetch_add)\(.*, std::memory_order_seq_cst\)", line), line
