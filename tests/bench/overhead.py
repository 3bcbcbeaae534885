"""`overhead`: the cost of the engine without a model, compared with its budgets."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench import PROGRAM
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import add_output_options, new_parser

if TYPE_CHECKING:
    from bench.scheduling_cost import SchedulingCost
    from bench.streaming_cost import MetricsCost, StreamingCost

PAGE_SIZES = (1, 16)


def parser() -> argparse.ArgumentParser:
    options = new_parser("overhead", "Measure the engine's own costs, without a model.", program=PROGRAM)
    options.add_argument("figure", nargs="?", choices=("all", "scheduling", "streaming", "metrics"), default="all")
    options.add_argument("--running", type=int, default=256, help="decoding sequences, for scheduling")
    options.add_argument("--steps", type=int, default=1000, help="measured steps of scheduling")
    options.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="clients, for streaming")
    options.add_argument("--tokens", type=int, default=256, help="streamed to each client")
    options.add_argument("--repetitions", type=int, default=1, help="of streaming; the cheapest counts")
    options.add_argument("--turns", type=int, default=5, help="of all tokens, for metrics")
    options.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and report. Return 1 if a budget is exceeded and --check is set."""
    options = parser().parse_args(argv)
    results: dict[str, Any] = {}
    kept = True
    if options.running < 1 or options.steps < 1:
        raise ConfigurationError("--running and --steps must be at least 1.")
    if options.figure in ("all", "scheduling"):
        results["scheduling"] = costs = _schedule(options)
        kept = kept and all(cost.within_budget for cost in costs)
    if options.figure in ("all", "streaming"):
        results["streaming"] = costs = _stream(options)
        kept = kept and all(cost.within_budget for cost in costs)
    if options.figure in ("all", "metrics"):
        results["metrics"] = costs = _metrics(options)
        kept = kept and all(cost.within_budget for cost in costs)
    if options.output_file:
        content = report.document("overhead", vars(options), results, argv=argv, program=PROGRAM)
        report.write(options.output_file, content)
    return 1 if options.check and not kept else 0


def _schedule(options: argparse.Namespace) -> list[SchedulingCost]:
    from bench.scheduling_cost import BUDGET_US, measure_scheduling

    costs = [measure_scheduling(running=options.running, page_size=size, steps=options.steps) for size in PAGE_SIZES]
    rows: list[report.Row] = [
        ("running sequences", options.running),
        ("steps", options.steps),
        ("budget (us/step)", BUDGET_US),
    ]
    figures = {}
    for cost in costs:
        pages = f"pages of {cost.page_size}"
        figures |= {f"step, {pages} (us)": cost.step_us}
        figures |= {f"  fill (us)  {pages}": cost.fill_us, f"  apply (us) {pages}": cost.apply_us}
    report.say(report.table("scheduling", rows, figures, heads=("min", "median", "p99", "max")))
    return costs


def _stream(options: argparse.Namespace) -> list[StreamingCost]:
    from bench.streaming_cost import BUDGET_US, measure_streaming

    costs = [
        measure_streaming(streams=streams, output_tokens=options.tokens, repetitions=options.repetitions)
        for streams in options.streams
    ]
    rows: list[report.Row] = [("tokens per stream", options.tokens), ("budget (us/token)", BUDGET_US)]
    for cost in costs:
        rows += [
            (f"{cost.streams} streams: loop (us/token)", cost.token_us),
            ("  loop (us/request)", cost.request_us),
            ("  tokens/s", cost.tokens / cost.duration_s),
            ("  tokens per event", cost.tokens / cost.events),
            ("  loop busy", f"{cost.cpu_s / cost.duration_s:.0%}"),
        ]
    report.say(report.table("streaming", rows))
    return costs


def _metrics(options: argparse.Namespace) -> list[MetricsCost]:
    from bench.streaming_cost import METRICS_BUDGET_US, measure_metrics

    costs = [
        measure_metrics(streams=streams, output_tokens=options.tokens, turns=options.turns)
        for streams in options.streams
    ]
    rows: list[report.Row] = [("turns", options.turns), ("budget (us/token)", METRICS_BUDGET_US)]
    for cost in costs:
        rows += [
            (f"{cost.streams} streams: added, median turn (us/token)", cost.added_us),
            ("  added, least turn (us/token)", min(cost.more_us)),
            ("  added, most (us/token)", max(cost.more_us)),
            ("  without metrics, median (us/token)", statistics.median(cost.off_us)),
            ("  with metrics, median (us/token)", statistics.median(cost.on_us)),
        ]
    report.say(report.table("metrics", rows))
    return costs
