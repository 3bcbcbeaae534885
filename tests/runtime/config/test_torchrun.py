from __future__ import annotations

import pytest

from runtime.config import Args
from runtime.config.resolve.parallel import with_torchrun
from runtime.errors import ConfigurationError

STARTED = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_machines_are_those_of_torchrun():
    args = with_torchrun(Args.of(tp_size=2), STARTED).parallel
    assert (args.nnodes, args.node_rank, args.dist_init_addr, args.tp_size) == (2, 1, "10.0.0.1:29501", 2)


def test_what_was_said_stands():
    assert with_torchrun(Args.of(dist_init_addr="h:1"), STARTED).parallel.dist_init_addr == "h:1"


def test_without_torchrun_nothing_changes():
    args = Args.of(tp_size=2)
    assert with_torchrun(args, {"RANK": "1", "WORLD_SIZE": "4"}) is args
    assert with_torchrun(args, {**STARTED, "WORLD_SIZE": "1"}) is args


def test_several_processes_of_torchrun_on_a_machine_are_refused():
    with pytest.raises(ConfigurationError, match="--nproc-per-node 1"):
        with_torchrun(Args.of(), {**STARTED, "LOCAL_WORLD_SIZE": "2"})
