"""The stages of `gpu-contact`, in the order in which a failure is most informative."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    kept_s: float = 0  # time reserved for this stage, even if earlier stages hang

    def command(self, device: str, scratch: str, folder: str) -> list[str]:
        """Return the command line. The stage writes its measurements to `scratch`, and other files to `folder`."""
        fill = {"DEVICE": device, "SCRATCH": scratch, "FOLDER": folder}
        return [sys.executable, *(fill.get(word, word) for word in self.words)]


def stages(device: str) -> tuple[Stage, ...]:
    """Return all stages for this device. On a CPU, which is a rehearsal, they use the smallest sizes."""
    rehearsal = device == "cpu"
    found = (
        _command("environment", ("-m", "serve", "explain", "--device", "DEVICE"), 60),
        _command("FlashInfer's signatures", ("-m", "bench.contact.flashinfer_calls"), 60),
        *(_smoke(name, options, rehearsal) for name, options in SMOKES.items()),
        _tests("kernels", ("tests/gpu/test_operations.py",), 240, test_limit_s=90),
        _measured("captures that fail", "bench.contact.failed_capture", (), rehearsal, 60),
        _measured("figures: kernels", SPEEDS, ("--kernels", "products", "attention"), rehearsal, 120),
        *(_measured(f"figures: {kind}", SPEEDS, ("--kernels", kind), rehearsal, 90) for kind in KINDS),
        _tests("tokens of Llama and Qwen3", (*ANSWERS, "-k", "llama or (qwen3 and not moe)"), 240),
        _tests("served", ("tests/gpu/test_serving.py",), 180),
        _figures("decode", rehearsal, 150),
        _figures("launch", rehearsal, 180),
        _measured("a trace of decode steps", "bench.contact.trace", ("--folder", "FOLDER"), rehearsal, 90),
        _figures("offline", rehearsal, 180),
        _figures("mixed", rehearsal, 90),
        _figures("occupancy", rehearsal, 120),
        _figures("prefix", rehearsal, 90),
        _figures("online", rehearsal, 240),
        _figures("cold", rehearsal, 150),
        _tests("tokens of the other families", (*ANSWERS, "-k", "not llama and not (qwen3 and not moe)"), 480),
    )
    return tuple(replace(stage, kept_s=KEPT_S.get(stage.name, 0)) for stage in found)


# Seconds reserved for each of these stages, even if other stages hang. Together they fit a budget of nine minutes.
KEPT_S = {
    "environment": 15,
    "FlashInfer's signatures": 10,
    "served, no graphs": 40,
    "served, graphs": 40,
    "kernels": 90,
    "captures that fail": 20,
    "figures: kernels": 50,
    "figures: choosing": 35,
    "figures: experts": 35,
    "figures: recurrence": 20,
    "tokens of Llama and Qwen3": 40,
    "served": 40,
    "figures: decode": 35,
    "figures: launch": 40,
    "a trace of decode steps": 30,
}
SPEEDS, KINDS = "bench.contact.speeds", ("choosing", "experts", "recurrence")
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


def _measured(name: str, module: str, options: tuple[str, ...], rehearsal: bool, limit_s: float) -> Stage:
    small = ("--small",) if rehearsal else ()
    words = ("-m", module, "--device", "DEVICE", *small, *options, "--output-file", "SCRATCH")
    return Stage(name=name, kind="figures", words=words, limit_s=limit_s)
