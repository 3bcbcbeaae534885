"""`penstock quantize`: write a checkpoint again with rounded weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

METHODS = {
    "w4a16": "whole numbers of 4 bits, groups of 32 inputs",
    "w8a8": "whole numbers of 8 bits, one scale for each output, activations likewise",
    "fp8": "e4m3, one scale for each output, activations likewise",
}


def main(words: Sequence[str]) -> int:
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
