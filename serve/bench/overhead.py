"""`overhead`: what the engine costs without a model, against what it promises."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from serve.bench import report
from serve.bench.options import add_output_options, new_parser
from serve.bench.scheduling_cost import BUDGET_US, SchedulingCost, measure_scheduling

PAGE_SIZES = (1, 16)


def parser() -> argparse.ArgumentParser:
    options = new_parser("overhead", "Measure the engine's own costs, without a model.")
    options.add_argument("figure", nargs="?", choices=("scheduling",), default="scheduling")
    options.add_argument("--running", type=int, default=256, help="decoding sequences")
    options.add_argument("--steps", type=int, default=1000, help="measured steps of scheduling")
    options.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    scheduling = [
        measure_scheduling(running=options.running, page_size=size, steps=options.steps)
        for size in PAGE_SIZES
    ]
    report.say(_render_scheduling(scheduling))
    if options.output_file:
        results: dict[str, Any] = {"scheduling": scheduling}
        report.write(options.output_file, report.document("overhead", vars(options), results, argv=argv))
    kept = all(cost.within_budget for cost in scheduling)
    return 1 if options.check and not kept else 0


def _render_scheduling(costs: Sequence[SchedulingCost]) -> str:
    rows: list[report.Row] = [
        ("running sequences", costs[0].running),
        ("steps", costs[0].steps),
        ("budget (us/step)", BUDGET_US),
    ]
    figures = {}
    for cost in costs:
        pages = f"pages of {cost.page_size}"
        figures |= {f"step, {pages} (us)": cost.step_us}
        figures |= {f"  fill (us)  {pages}": cost.fill_us, f"  apply (us) {pages}": cost.apply_us}
    return report.table("scheduling", rows, figures, heads=("min", "median", "p99", "max"))
