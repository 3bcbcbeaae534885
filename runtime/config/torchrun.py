"""Started by torchrun, the machines and where they meet are known from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.config.args import Args
from runtime.errors import ConfigurationError

MARK = "TORCHELASTIC_RUN_ID"  # set by torchrun in what it starts


def with_torchrun(args: Args, environment: Mapping[str, str]) -> Args:
    """The arguments with --nnodes, --node-rank and --dist-init-addr as torchrun has them, unless said.

    torchrun itself listens at MASTER_PORT, so ours is the next one. Raises `ConfigurationError` when torchrun
    started several processes on a machine: Penstock starts the ranks of a machine itself.
    """
    if MARK not in environment:
        return args
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            "Say --nproc-per-node 1 to torchrun: Penstock starts the other processes of a machine itself."
        )
    nnodes = int(environment.get("WORLD_SIZE", "1"))
    if nnodes == 1:
        return args
    found = {
        "nnodes": nnodes,
        "node_rank": int(environment["RANK"]),
        "dist_init_addr": f"{environment['MASTER_ADDR']}:{int(environment['MASTER_PORT']) + 1}",
    }
    return Args.of(**{**found, **args.keywords()})
