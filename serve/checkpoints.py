"""`penstock quantize` and `penstock shard`: write a checkpoint again, with rounded weights or for each rank apart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

METHODS = {
    "w4a16": "whole numbers of 4 bits, groups of 32 inputs",
    "w8a8": "whole numbers of 8 bits, one scale for each output, activations likewise",
    "fp8": "e4m3, one scale for each output, activations likewise",
}


def quantize(words: Sequence[str]) -> int:
    """Follow the words after `quantize`; returns the exit status. Raises CheckpointError for what cannot be done."""
    parser = argparse.ArgumentParser(
        prog="penstock quantize",
        description="Write a checkpoint with rounded weights, in the form of compressed-tensors.",
    )
    parser.add_argument(
        "--model-path", "--model", required=True, metavar="DIR", help="an unquantised checkpoint"
    )
    about = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    parser.add_argument("--method", required=True, choices=tuple(METHODS), help=about)
    parser.add_argument("--output", required=True, metavar="DIR", help="a directory that is not there yet")
    options = parser.parse_args(words)
    from runtime.models.quantize import quantize_checkpoint  # imports torch

    size = quantize_checkpoint(options.model_path, options.method, options.output)
    sys.stdout.write(f"{options.output}: {size / 2**20:,.0f} MiB of weights\n")
    return 0


def shard(words: Sequence[str]) -> int:
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
