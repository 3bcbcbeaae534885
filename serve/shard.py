"""`penstock shard`: write a checkpoint again, with files of its own for each rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Follow the words after `shard`; returns the exit status. Raises CheckpointError for what cannot be done."""
    parser = argparse.ArgumentParser(
        prog="penstock shard",
        description="Write a checkpoint with files of its own for each rank, to be served with --load-format "
        "sharded_state and the same --tp-size and --pp-size.",
    )
    parser.add_argument(
        "--model-path", "--model", required=True, metavar="DIR", help="an unquantised checkpoint"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="a directory that is not there yet")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=_count, default=1, metavar="N")
    parser.add_argument("--pp-size", "--pipeline-parallel-size", type=_count, default=1, metavar="N")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's"
    )
    options = parser.parse_args(words)
    from runtime.models.sharded_state import write_shares  # imports torch

    size = write_shares(options.model_path, options.output, options.tp_size, options.pp_size, options.dtype)
    ranks = options.tp_size * options.pp_size
    sys.stdout.write(f"{options.output}: {size / 2**20:,.0f} MiB of weights for {ranks} ranks\n")
    return 0


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 1024:
        raise ValueError
    return count
