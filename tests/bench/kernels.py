"""`kernels`: the time of a step on a CPU, kernel by kernel.

The C++ kernels of a recorded step run one by one. Each has its own start, which a whole step needs only once, so the
sum slightly exceeds the step's time, which is measured too.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

from bench import PROGRAM
from bench.step import make_batch, one_process_plan, written_pool
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import parse
from serve.bench.options import add_output_options, new_parser


class Profile(NamedTuple):
    """Results for one batch size: the median time of whole steps, and the minimum time of each kind of kernel."""

    batch_size: int
    step_ms: float
    kernels_ms: Mapping[str, float]  # name -> time of all kernels with this name
    counts: Mapping[str, int]


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "kernels",
        "Time the kernels of a step in C++. Every other option is the engine's: --model-path DIR ...",
        program=PROGRAM,
    )
    group = options.add_argument_group("batch")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="rows")
    group.add_argument("--context-len", type=int, default=128, help="tokens of each row already in the cache")
    group.add_argument("--new-len", type=int, default=1, help="tokens that each row computes; 1 is decoding")
    group.add_argument("--repetitions", type=int, default=20)
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    if min(*options.batch_size, options.new_len, options.repetitions, options.context_len + 1) < 1:
        raise ConfigurationError("Every size must be at least 1, --context-len at least 0.")
    facts, plan = one_process_plan(args)
    profiles = measure(options, facts, plan)
    report.say("\n\n".join(map(_render, profiles)))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords()}
        results = {"profiles": [report.plain(profile) for profile in profiles]}
        report.write(options.output_file, report.document("kernels", settings, results, argv=argv, program=PROGRAM))
    return 0


def measure(options: argparse.Namespace, facts: ModelFacts, plan: Plan) -> list[Profile]:
    """Measure one model. Raises ConfigurationError if steps are not computed by C++ kernels alone."""
    import torch

    from ops.cpp.kernel_launcher import NotCapturable
    from ops.select import select
    from runtime.loading.loader import load_model
    from runtime.worker.cpu_graph import CpuGraph

    kernels = select(plan.kernels.choices, plan.kernels.settings)
    model = load_model(facts, plan.model, kernels)
    rows, length = max(options.batch_size), options.context_len + options.new_len
    pool = written_pool(facts, plan, rows, length)
    try:
        cpu_graph = CpuGraph(model, pool, kernels, rows * options.new_len, rows)
    except NotCapturable as reason:
        raise ConfigurationError(f"This model has no step of C++ kernels alone: {reason}.") from None
    last_tokens = torch.zeros(rows, dtype=torch.int64)
    profiles = []
    with torch.inference_mode():
        for size in options.batch_size:
            batch = make_batch(size, options.context_len, options.new_len, plan.cache.page_size)
            steps: list[float] = []
            kernel_times: defaultdict[str, list[float]] = defaultdict(list)
            for _ in range(1 + options.repetitions):
                began = perf_counter()
                cpu_graph.choose(batch, last_tokens)
                steps.append(perf_counter() - began)
                counts: defaultdict[str, int] = defaultdict(int)
                sums: defaultdict[str, float] = defaultdict(float)
                for name, seconds in cpu_graph.time(batch, last_tokens):
                    counts[name] += 1
                    sums[name] += seconds
                for name, seconds in sums.items():
                    kernel_times[name].append(seconds)
            least = {name: 1e3 * min(times[1:]) for name, times in kernel_times.items()}
            profiles.append(Profile(size, 1e3 * median(steps[1:]), least, dict(counts)))
    cpu_graph.close()
    return profiles


def _render(profile: Profile) -> str:
    lines = [f"{profile.batch_size} rows: a step takes {profile.step_ms:.3f} ms"]
    total = sum(profile.kernels_ms.values())
    for name, taken in sorted(profile.kernels_ms.items(), key=lambda item: -item[1]):
        lines.append(f"{name:>10}{profile.counts[name]:>6} x{taken:>12.3f} ms{taken / total:>8.0%}")
    return "\n".join(lines)
