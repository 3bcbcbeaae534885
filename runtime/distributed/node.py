"""A machine that is not the first: it runs workers for the engine there, and ends with them."""

from __future__ import annotations

import logging
import os
import subprocess
import time

from ops.machine import Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.distributed.rendezvous import TOKEN_VARIABLE, fingerprint, report
from runtime.distributed.spawn import start_process

logger = logging.getLogger("penstock.core")

POLL_S = 0.1


def run_node(plan: Plan, facts: ModelFacts) -> int:
    """Report this machine's ranks to the first machine and run them; returns the worst exit status.

    Blocks until they end. Raises `ConfigurationError` when the first machine does not take them.
    """
    parallel = plan.parallel
    if parallel.meeting is None:
        raise RuntimeError("Several machines need a place to meet.")
    token, model = os.environ.get(TOKEN_VARIABLE, ""), fingerprint(facts)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(_num_threads(plan))}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in parallel.ranks_here:
            with report(parallel.meeting, token, rank, model, parallel.join_timeout_s) as end:
                end.set_inheritable(True)
                processes.append(start_process(end, threads, facts.path))
        logger.info("Ranks %s run here.", ", ".join(map(str, parallel.ranks_here)))
        while all(process.poll() is None for process in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
    return max((abs(process.wait()) for process in processes), default=0)


def _num_threads(plan: Plan) -> int:
    return max(1, Machine.probe().num_cpus // len(plan.parallel.ranks_here))
