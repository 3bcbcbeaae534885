"""Threads that share work: every task runs once, sleeping threads are woken, and absent threads are not awaited."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cpp_kernels import compiler
from ops.cpp.build import SOURCES

# Runs rounds of kernels with four parts each, in which threads are late in turn, next to a plain loop. Prints the first
# round with a different result. The data of a round is freed after it.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <memory>
#include "pool.h"
using namespace penstock;

constexpr int N = 97;
int64_t one[N], two[N], total;
std::atomic<int64_t> entered{1};

struct Operands { const int64_t* from; int64_t* to; };

void be_late(int64_t turns) { for (; turns > 0; turns--) asm volatile(""); }

void work(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const Operands*>(operands);
    be_late(entered.fetch_add(1) * 7919 % 400);
    threads.share(N, [&](int64_t i) { be_late((i * 31 + threads.rank * 977) % 50), one[i] = o.from[i] + 1; });
    threads.barrier();
    for (int64_t i; (i = threads.take()) < N;) two[i] = one[N - 1 - i] + one[i];
    threads.barrier();
    threads.share(1, [&](int64_t) { total = 0; for (int64_t value : two) total += value; });
    threads.barrier();
    threads.share(N, [&](int64_t i) { o.to[i] = (two[i] ^ total) % 1000003 + one[i] % 8; });
}

void expect(const int64_t* from, int64_t* to) {
    int64_t first[N], second[N], sum = 0;
    for (int i = 0; i < N; i++) first[i] = from[i] + 1;
    for (int i = 0; i < N; i++) sum += second[i] = first[N - 1 - i] + first[i];
    for (int i = 0; i < N; i++) to[i] = (second[i] ^ sum) % 1000003 + first[i] % 8;
}

int main(int, char** arguments) {
    const int size = atoi(arguments[1]), rounds = atoi(arguments[2]);
    Pool pool(size);
    int64_t found[2][N], expected[2][N];
    for (int i = 0; i < N; i++) found[0][i] = expected[0][i] = found[1][i] = expected[1][i] = i;
    for (int round = 0; round < rounds; round++) {
        const int count = 1 + round % 8;
        auto step = std::make_unique<Step>();
        auto operands = std::make_unique<Operands[]>(2);
        auto nodes = std::make_unique<GraphNode[]>(count);
        for (int side = 0; side < 2; side++) operands[side] = {found[side], found[1 - side]};
        for (int i = 0; i < count; i++) nodes[i] = {work, &operands[i % 2]};
        pool.run(nodes.get(), count, step.get());
        for (int i = 0; i < count; i++) expect(expected[i % 2], expected[1 - i % 2]);
        for (int side = 0; side < 2; side++)
            for (int i = 0; i < N; i++)
                if (found[side][i] != expected[side][i]) return printf("round %d", round), 0;
        if (round % 5 == 0) be_late(round * 7919 % 30000);
    }
    printf("same");
}
"""

# Two threads of a group, both driven by one thread.
BY_HAND = """
#include <cstdio>
#include "thread_group.h"
using namespace penstock;

int main() {
    GroupState state(2);
    ThreadGroup here(0, 2, state), away(1, 2, state);
    const auto now = [&] { return state.progress.load(); };
    const auto count = [&](ThreadGroup& threads) { int n = 0; threads.share(9, [&](int64_t) { n++; }); return n; };
    const uint64_t first = now();
    const bool joined = here.join(first);
    const int all = count(here);
    here.barrier();  // waits for nobody
    const bool late = away.join(first), amid = away.join(now());
    const int again = count(here);
    here.leave();
    const uint64_t second = now();
    const bool both = here.join(second) && away.join(now());
    const int mine = count(here), left = count(away);
    std::thread leaving([&] { here.leave(); });
    std::this_thread::yield();
    const bool waited = parts_of(now()) == parts_of(second);
    away.leave();
    leaving.join();
    printf("%d %d %d %d %d %d %d %d %d %d", joined, all, late, amid, again, both, mine, left, waited,
           int(node_of(now()) - node_of(first)));
}
"""


def built(source: str, folder: Path) -> Path:
    """Compile a program. Headers in its folder override the library's headers."""
    (folder / "program.cpp").write_text(source)
    program = folder / "program"
    command = [compiler(), "-std=c++20", "-O2", "-pthread", f"-I{SOURCES}"]
    subprocess.run([*command, str(folder / "program.cpp"), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program in a version in which threads sleep immediately instead of polling."""
    folder = tmp_path_factory.mktemp("sleepers")
    replaced = 0
    for header in ("pool.h", "thread_group.h", "step.h"):
        text, count = re.subn(r"(constexpr int \w*SPINS) = \d+;", r"\1 = 0;", (SOURCES / header).read_text())
        (folder / header).write_text(text)
        replaced += count
    assert replaced == 2
    return built(PROGRAM, folder)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_sleeping_threads_do_all_work_once(sleepers: Path, num_threads: int) -> None:
    command = [sleepers, str(num_threads), "5000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "same"


def test_a_thread_that_is_away_is_not_waited_for_and_joins_later(tmp_path: Path) -> None:
    program = built(BY_HAND, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=100)
    joined, all_tasks, late, amid, again, both, mine, left, waited, nodes = map(int, done.stdout.split())
    assert (joined, all_tasks, again) == (1, 9, 9)
    assert (late, amid) == (0, 0)  # no thread joins a node after its first part
    assert (both, mine, left) == (1, 9, 0)
    assert (waited, nodes) == (1, 2)


def test_what_wakes_sleepers_is_written_in_the_one_order_of_all_threads() -> None:
    """With a weaker memory order, the store might become visible after `notify_all` has looked for sleeping threads.

    A test cannot provoke this: on x86 a store would have to be delayed for longer than a thread needs to sleep.
    """
    written = []
    for header in ("pool.h", "thread_group.h"):
        lines = (SOURCES / header).read_text().splitlines()
        written += [lines[i - 1] for i, line in enumerate(lines) if "notify_all();" in line]
    assert len(written) == 2
    for line in written:
        assert re.search(r"\.(store|fetch_add)\(.*, std::memory_order_seq_cst\)", line), line
