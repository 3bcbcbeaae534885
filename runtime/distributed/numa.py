"""Binds processes to NUMA nodes (--numa-node). Works on Linux. Does not import torch."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ops.machine import node_cpus
from runtime.errors import ConfigurationError

logger = logging.getLogger("penstock.core")

VARIABLE = "PENSTOCK_NUMA_NODE"  # holds a worker process's node, and the number of ranks that share the node
PREFERRED = 1  # MPOL_PREFERRED of set_mempolicy(2): other nodes are used only when this one is full
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind(node: int) -> None:
    """Bind this process to a NUMA node: all its threads run on the node's CPUs, and memory comes from the node first.

    Threads that start later inherit this. Raises `ConfigurationError` if this process may use none of these CPUs.
    """
    cpus = node_cpus(node)
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, cpus)
        except OSError as error:
            raise ConfigurationError(f"--numa-node {node}: this process may not run on the node's CPUs.") from error
    if not _prefer_memory(node):
        logger.info("Memory comes from the node of the thread that first writes it: libnuma cannot set a policy here.")
    logger.info("This process is bound to NUMA node %d with %d CPUs.", node, len(os.sched_getaffinity(0)))


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


def _prefer_memory(node: int) -> bool:
    """Set the memory policy of this thread and of threads that it starts later. Return whether this succeeded."""
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return library.set_mempolicy(PREFERRED, words, ctypes.c_ulong(len(words) * _WORD_BITS + 1)) == 0
