"""Binds processes to NUMA nodes (--numa-node). Works on Linux. Does not import torch."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ops.machine import node_cpus
from runtime.errors import ConfigurationError

logger = logging.getLogger("penstock.core")

VARIABLE = "PENSTOCK_NUMA_NODE"  # holds a worker process's node, and the number of ranks that share the node
PREFERRED = 1  # MPOL_PREFERRED of set_mempolicy(2): other nodes are used only when this one is full
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NUM_NODES = 1024  # Linux has at most this number of nodes
_NodeMask = ctypes.c_ulong * (_NUM_NODES // _WORD_BITS)


def bind(node: int) -> None:
    """Bind this process to a NUMA node: all its threads run on the node's CPUs, and memory comes from the node first.

    Threads that start later inherit this. Raises `ConfigurationError` if this process may use none of these CPUs.
    """
    cpus = node_cpus(node)
    for thread in _threads():
        try:
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, cpus)
        except OSError as error:
            raise ConfigurationError(f"--numa-node {node}: this process may not run on the node's CPUs.") from error
    if not _prefer_memory(node):
        logger.info("Memory comes from the node of the thread that first writes it: libnuma cannot set a policy here.")
    logger.info("This process is bound to NUMA node %d with %d CPUs.", node, len(os.sched_getaffinity(0)))


@contextmanager
def bound(nodes: Sequence[int] | None) -> Iterator[None]:
    """Bind this process to the first of the nodes inside the context, if `nodes` is not None (see `bind`).

    At the end, its threads may run on the same CPUs as before. Threads that started in the context may then run on the
    CPUs of the caller.
    """
    if nodes is None:
        yield
        return
    mine, before, policy = os.sched_getaffinity(0), {}, _memory_policy()
    for thread in _threads():
        with suppress(ProcessLookupError):  # the thread has ended
            before[thread] = os.sched_getaffinity(thread)
    try:
        bind(nodes[0])
        yield
    finally:
        for thread in _threads():
            with suppress(OSError):  # the thread has ended, or this process may no longer use these CPUs
                os.sched_setaffinity(thread, before.get(thread, mine))
        if policy is not None:
            _set_memory_policy(*policy)


def rank_environment(nodes: Sequence[int] | None, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker process, with its NUMA node if `nodes` has one for each rank.

    `index` is the rank's index on this machine. If `environment` has OMP_NUM_THREADS, `bind_worker` will replace it by
    the rank's share of the node's CPUs.
    """
    if nodes is None:
        return dict(environment)
    sharing = nodes.count(nodes[index]) if "OMP_NUM_THREADS" in environment else 0
    return {**environment, VARIABLE: f"{nodes[index]}/{sharing}"}


def bind_worker() -> None:
    """Bind this worker process to the node in its environment. Must be called before torch is imported."""
    node, _, sharing = os.environ.get(VARIABLE, "").partition("/")
    if not node:
        return
    bind(int(node))
    if int(sharing):
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // int(sharing)))


def _threads() -> list[int]:
    return [int(thread) for thread in os.listdir("/proc/self/task")]


def _prefer_memory(node: int) -> bool:
    """Set the memory policy of this thread and of threads that it starts later. Return whether this succeeded."""
    mask = _NodeMask()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return _set_memory_policy(PREFERRED, mask)


def _set_memory_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> bool:
    library = _libnuma()
    return library is not None and library.set_mempolicy(mode, mask, ctypes.c_ulong(_NUM_NODES + 1)) == 0


def _memory_policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]] | None:
    """Return the mode and the nodes of this thread's memory policy, or None if they are unknown."""
    mode, mask, library = ctypes.c_int(), _NodeMask(), _libnuma()
    if library is None or library.get_mempolicy(ctypes.byref(mode), mask, ctypes.c_ulong(_NUM_NODES + 1), None, 0):
        return None
    return mode.value, mask


def _libnuma() -> ctypes.CDLL | None:
    with suppress(OSError):
        return ctypes.CDLL("libnuma.so.1")
    return None
