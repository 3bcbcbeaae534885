"""Processes that are bound to a NUMA node run on its CPUs only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tiny_models
from ops.machine import Machine, _numbers_in, node_cpus
from runtime.config import Args
from runtime.config.resolve import resolve
from runtime.distributed.numa import rank_environment
from runtime.distributed.worker_group import thread_environment
from serve import Engine
from server_process import ROOT, serving
from small_facts import FACTS

NODE = min(Machine.probe().numa_nodes, default=-1)
CPUS = node_cpus(NODE) & (os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset())
on_linux = pytest.mark.skipif(not CPUS, reason="needs Linux with NUMA nodes")


def affinities(process: int) -> set[frozenset[int]]:
    """Return the CPUs on which the threads of a process may run."""
    found = set()
    for thread in Path(f"/proc/{process}/task").iterdir():
        found.add(frozenset(os.sched_getaffinity(int(thread.name))))
    return found


def test_lists_of_cpus_are_read_as_linux_writes_them() -> None:
    assert _numbers_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert _numbers_in("") == frozenset()
    assert node_cpus(4096) == frozenset()


def test_ranks_of_a_node_divide_its_cpus() -> None:
    threads = {"OMP_NUM_THREADS": "1"}
    assert [rank_environment((0, 1, 1), rank, threads)["PENSTOCK_NUMA_NODE"] for rank in range(3)] == [
        "0/1",
        "1/2",
        "1/2",
    ]
    assert rank_environment((0, 1), 1, {}) == {"PENSTOCK_NUMA_NODE": "1/0"}  # the user has set the threads
    assert rank_environment(None, 1, threads) == threads


def test_a_single_rank_has_as_many_threads_as_its_node_has_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counted the CPUs of all nodes when it was imported."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = Machine.named("cpu")
    monkeypatch.setattr(Machine, "probe", lambda: machine)
    bound, free = (resolve(Args.of(model_path="small", numa_node=nodes), machine, FACTS) for nodes in ((0,), None))
    assert thread_environment(bound) == {"OMP_NUM_THREADS": str(machine.num_cpus)}
    assert thread_environment(free) == {}


@on_linux
def test_all_threads_of_a_process_are_bound_and_a_missing_node_is_an_error() -> None:
    code = """
import os, sys, threading
from runtime.distributed.numa import bind, bound
node, first, cpus = int(sys.argv[1]), {int(sys.argv[2])}, {*map(int, sys.argv[3:])}
os.sched_setaffinity(0, first)  # so that binding changes something
wait = threading.Event()
affinities = lambda: {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
start = lambda: threading.Thread(target=wait.wait, daemon=True).start()
start()
with bound([node, 4096]):
    start()
    print(affinities() == {frozenset(cpus)})
print(affinities() == {frozenset(first)}, len(os.listdir("/proc/self/task")))
with bound(None):
    print(affinities() == {frozenset(first)})
bind(node)
print(affinities() == {frozenset(cpus)})
try:
    bind(4096)
except Exception as error:
    print(error)
"""
    words = [sys.executable, "-c", code, str(NODE), str(min(CPUS)), *map(str, CPUS)]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout.splitlines() == [
        "True",
        "True 3",
        "True",
        "True",
        "--numa-node 4096: this process may not run on the node's CPUs.",
    ], answer.stderr


@on_linux
async def test_an_engine_gives_its_process_back_all_cpus() -> None:
    """An engine in a notebook runs in the process of its caller."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(CPUS)})  # binding then widens this
    try:
        async with Engine(tiny_models.cached(), numa_node=(NODE,), skip_tokenizer_init=True, max_total_tokens=64):
            assert os.sched_getaffinity(0) == CPUS
        assert os.sched_getaffinity(0) == {min(CPUS)}
    finally:
        os.sched_setaffinity(0, before)


@on_linux
@pytest.mark.slow
def test_the_server_and_its_workers_run_on_their_node() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(CPUS)})  # inherited by the server, which binding then widens
    try:
        with serving("--tp-size", "2", "--numa-node", str(NODE), str(NODE), "--max-total-tokens", "1024") as server:
            os.sched_setaffinity(0, before)
            processes = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children())]
            assert len(processes) == 2
            for process in processes:
                assert affinities(process) == {frozenset(CPUS)}
    finally:
        os.sched_setaffinity(0, before)
