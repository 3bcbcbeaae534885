"""The stages of `gpu-contact`, in the order in which a failure is most informative."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["command", "tests", "figures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage with its own limit: one process, or one process after another for tests."""

    name: str
    kind: Kind
    words: tuple[str, ...]  # arguments of the interpreter
    limit_s: float
    test_limit_s: float = 120  # limit of a single test

    def command(self, device: str, scratch: str) -> list[str]:
        """Return the command line. The stage writes its measurements to `scratch`."""
        fill = {"DEVICE": device, "SCRATCH": scratch}
        return [sys.executable, *(fill.get(word, word) for word in self.words)]


def stages(device: str) -> tuple[Stage, ...]:
    """Return all stages for this device. On a CPU, which is a rehearsal, they use the smallest sizes."""
    rehearsal = device == "cpu"
    return (
        _command("environment", ("-m", "serve", "explain", "--device", "DEVICE"), 60),
        *(_smoke(name, options, rehearsal) for name, options in SMOKES.items()),
        _tests("kernels", ("tests/gpu/test_operations.py",), 240, test_limit_s=90),
        _speeds(rehearsal),
        _tests("tokens of Llama and Qwen3", (*ANSWERS, "-k", "llama or (qwen3 and not moe)"), 240),
        _tests("served", ("tests/gpu/test_serving.py",), 180),
        _figures("decode", rehearsal, 150),
        _figures("offline", rehearsal, 180),
        _figures("mixed", rehearsal, 90),
        _figures("occupancy", rehearsal, 120),
        _figures("launch", rehearsal, 120),
        _figures("prefix", rehearsal, 90),
        _figures("online", rehearsal, 240),
        _figures("cold", rehearsal, 150),
        _tests("tokens of the other families", (*ANSWERS, "-k", "not llama and not (qwen3 and not moe)"), 480),
    )


ANSWERS = ("tests/gpu/test_answers.py",)
SMOKES: dict[str, tuple[str, ...]] = {
    "served, no graphs": ("--disable-cuda-graph",),
    "served, graphs": (),
    "served, fp8": ("--quantization", "fp8"),
    "served, sampling in torch": ("--sampling-backend", "pytorch"),
    "served, FlashInfer": ("--attention-backend", "flashinfer"),
    "served, plain torch": ("--attention-backend", "torch_native"),
}
GPU_ONLY = ("flashinfer",)


def _command(name: str, words: tuple[str, ...], limit_s: float) -> Stage:
    return Stage(name=name, kind="command", words=words, limit_s=limit_s)


def _smoke(name: str, options: Sequence[str], rehearsal: bool) -> Stage:
    if rehearsal and set(options) & set(GPU_ONLY):
        options = ("--attention-backend", "torch_native")
    words = ("-m", "bench.contact.smoke", "--device", "DEVICE", *options)
    return Stage(name=name, kind="command", words=words, limit_s=120)


def _tests(name: str, words: tuple[str, ...], limit_s: float, test_limit_s: float = 120) -> Stage:
    return Stage(name=name, kind="tests", words=words, limit_s=limit_s, test_limit_s=test_limit_s)


def _figures(row: str, rehearsal: bool, limit_s: float) -> Stage:
    small = ("--shape", "tiny") if rehearsal else ()
    words = ("-m", "bench", "gpu", "--device", "DEVICE", *small, "--rows", row, "--output-file", "SCRATCH")
    return Stage(name=f"figures: {row}", kind="figures", words=words, limit_s=limit_s)


def _speeds(rehearsal: bool) -> Stage:
    small = ("--small",) if rehearsal else ()
    words = ("-m", "bench.contact.speeds", "--device", "DEVICE", *small, "--output-file", "SCRATCH")
    return Stage(name="figures: kernels", kind="figures", words=words, limit_s=120)
