"""`penstock quantize` and `penstock shard`: write a checkpoint with quantised weights, or with one file per rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

METHODS = {
    "w4a16": "4-bit integers, groups of 32 inputs",
    "w8a8": "8-bit integers, one scale per output; activations too",
    "fp8": "e4m3, one scale per output; activations too",
}


def quantize(words: Sequence[str]) -> int:
    """Run `penstock quantize`, and return the exit status. `words` are the arguments after `quantize`.

    Raises `CheckpointError` if the checkpoint cannot be quantised.
    """
    parser = argparse.ArgumentParser(
        prog="penstock quantize",
        description="Write a checkpoint with quantised weights, in the format of compressed-tensors.",
    )
    parser.add_argument("--model-path", "--model", required=True, metavar="DIR", help="an unquantised checkpoint")
    about = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    parser.add_argument("--method", required=True, choices=tuple(METHODS), help=about)
    parser.add_argument("--output", required=True, metavar="DIR", help="a new directory")
    options = parser.parse_args(words)
    from runtime.loading.quantize import quantize_checkpoint  # imports torch

    size = quantize_checkpoint(options.model_path, options.method, options.output)
    sys.stdout.write(f"{options.output}: {size / 2**20:,.0f} MiB of weights\n")
    return 0


def shard(words: Sequence[str]) -> int:
    """Run `penstock shard`, and return the exit status. `words` are the arguments after `shard`.

    Raises `CheckpointError` if the checkpoint cannot be sharded.
    """
    parser = argparse.ArgumentParser(
        prog="penstock shard",
        description="Write a checkpoint with separate files per rank, to be served with --load-format "
        "sharded_state and the same --tp-size and --pp-size.",
    )
    parser.add_argument("--model-path", "--model", required=True, metavar="DIR", help="an unquantised checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=_num_ranks, default=1, metavar="N")
    parser.add_argument("--pp-size", "--pipeline-parallel-size", type=_num_ranks, default=1, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
    options = parser.parse_args(words)
    from runtime.loading.sharded_state import write_shards  # imports torch

    size = write_shards(options.model_path, options.output, options.tp_size, options.pp_size, options.dtype)
    ranks = options.tp_size * options.pp_size
    sys.stdout.write(f"{options.output}: {size / 2**20:,.0f} MiB of weights for {ranks} ranks\n")
    return 0


def _num_ranks(text: str) -> int:
    if not 1 <= (count := int(text)) <= 1024:
        raise ValueError
    return count
