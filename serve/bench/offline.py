"""`offline`: measure the engine's throughput when all requests of a workload are submitted at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from serve.bench import report
from serve.bench.load import (
    Progress,
    drive,
    generate_arguments,
    model_vocabulary,
    parse,
    run_with_engine,
)
from serve.bench.metrics import Outcome, Results, measure
from serve.bench.options import (
    add_dataset_options,
    add_output_options,
    build_prompts,
    build_warmup,
    new_parser,
    read_vocabulary,
)
from serve.bench.workload import Prompt

if TYPE_CHECKING:
    from serve import Engine


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "offline",
        "Measure throughput in this process. All other options are engine options: --model-path DIR ...",
    )
    add_dataset_options(options)
    add_output_options(options)
    options.add_argument("--output-details", action="store_true", help="per-request figures in the result")
    options.add_argument("--disable-ignore-eos", action="store_true", help="let the model end its outputs")
    options.add_argument("--warmup-requests", type=int, default=1, help="unmeasured requests that are sent first")
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    vocabulary = read_vocabulary(options) or model_vocabulary(args.get("model_path"))
    prompts = build_prompts(options, vocabulary, as_text=False)
    warmup = build_warmup(options, prompts, vocabulary, options.warmup_requests, as_text=False)
    ignore_eos = not options.disable_ignore_eos

    async def work(engine: Engine) -> tuple[list[Outcome], float]:
        await throughput(engine, warmup, ignore_eos=ignore_eos)
        with Progress(len(prompts), "prompts") as progress:
            return await throughput(engine, prompts, ignore_eos=ignore_eos, progress=progress)

    outcomes, duration_s = run_with_engine(args, work)
    results = measure(outcomes, duration_s)
    report.say(_render(results))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords()}
        details = outcomes if options.output_details else None
        report.write(options.output_file, report.document("offline", settings, results, details, argv))
    return 0


async def throughput(
    engine: Engine, prompts: Sequence[Prompt], *, ignore_eos: bool = True, progress: Progress | None = None
) -> tuple[list[Outcome], float]:
    """Generate from all prompts at once. Returns (one outcome per prompt, total time in seconds).

    Raises the engine's errors.
    """

    async def send(prompt: Prompt, start_s: float) -> Outcome:
        sent_s = perf_counter()
        answer = await engine.generate(**generate_arguments(prompt, ignore_eos=ignore_eos))
        meta = answer["meta_info"]
        return Outcome(
            started_s=sent_s - start_s,
            e2e_s=perf_counter() - sent_s,
            prompt_tokens=meta["prompt_tokens"],
            output_tokens=meta["completion_tokens"],
            cached_tokens=meta["cached_tokens"],
        )

    return await drive(prompts, [0.0] * len(prompts), send, progress=progress)


def _render(results: Results) -> str:
    rows: list[report.Row] = [
        ("duration (s)", results.duration_s),
        ("requests", results.completed),
        *report.throughput(results),
    ]
    return report.table("offline throughput", rows, {"request (ms)": results.e2e_ms})
