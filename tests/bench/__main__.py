"""`just study COMMAND ...`, which is `PYTHONPATH=tests:notebooks python -m bench COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import PROGRAM
from serve.bench.__main__ import run_command

COMMANDS = {
    "overhead": ("bench.overhead", "scheduling and streaming without a model"),
    "parallel": ("bench.parallel", "a step of two processes against one, in its parts"),
    "experts": ("bench.experts", "experts on several ranks: sums against all-to-all, and the balance of a skewed load"),
    "prefill-decode": ("bench.prefill_decode", "first tokens with prompts computed elsewhere, against one server"),
    "step": ("bench.step", "single steps in this process: chosen kernels against plain torch"),
    "adapters": ("bench.adapters", "tokens per second with LoRA adapters in a batch, and without"),
    "seeing": ("bench.seeing", "every image-text architecture of transformers, asked about an image"),
    "images": ("bench.images", "image prompts against transformers, and the lag of the event loop under images"),
    "grammars": ("bench.grammars", "steps with a grammar for each row against none, and masks alone"),
    "fast-forward": ("bench.fast_forward", "forced tokens appended without a step of their own, and sampled"),
    "drafts": ("bench.drafts", "speculative decoding against plain decoding: every token, and the speed"),
    "kernels": ("bench.kernels", "where the time of a step goes on a CPU, kernel by kernel"),
    "accuracy": ("bench.accuracy", "bfloat16 and 8 bits against transformers in float32"),
    "soak": ("bench.soak", "requests that come and leave at random, and what they leave behind"),
    "overload": ("bench.overload", "four times as many requests as can be answered"),
    "fuzz": ("bench.fuzz", "hostile requests on every route, beside seeded streams"),
    "slow": (
        "bench.slow_clients",
        "clients that read or send slowly, and what others notice of them",
    ),
    "gpu": ("bench.gpu.command", "a GPU with random weights of real shapes, beside its limits"),
    "gpu-model": ("bench.gpu_model", "predict decode steps on a GPU from bytes, operations and launches"),
    "gpu-tables": ("bench.gpu_tables", "add up measured kernels of other engines for gpu-model"),
    "gpu-bundle": ("bench.contact.bundle", "gather what a GPU machine without a package index lacks"),
    "gpu-contact": ("bench.contact.command", "prove everything that concerns a GPU within a budget of time"),
    "flashinfer-modules": (
        "bench.contact.flashinfer_modules",
        "compile FlashInfer's modules for Hopper, without a GPU",
    ),
    "cpu": ("bench.cpu.command", "ours and its peers on this machine's CPU, in turns"),
    "cpu-peers": ("bench.cpu.engines", "install the peers that `cpu` compares with"),
    "embeddings": (
        "bench.embeddings",
        "vectors of texts by ours, sentence-transformers and OpenVINO, in turns",
    ),
    "schemas": ("bench.schemas", "grammars of JSON schemas: instances that they accept, and their cost"),
    "sanitize": ("bench.sanitize", "the tests of the C++ kernels under a sanitizer"),
    "documents": (
        "bench.documents",
        "print a page or table of the documentation that declarations determine",
    ),
    "structure": ("bench.structure", "files, lines, types and imports of a checkout"),
    "checkpoint": ("bench.checkpoints", "write a random checkpoint of a known shape"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one study and return the process's exit status, which is 2 for an invalid command line."""
    return run_command(PROGRAM, COMMANDS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
