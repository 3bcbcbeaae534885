"""`step`: one forward with the kernels that are chosen for this machine, against plain torch, in turns.

Both models live in this process and take the same batch one after the other, again and again, so that whatever
else the machine does falls on both: the ratio means more than the times. A step is all that the runner does with
a batch: inputs, forward, greedy choice, tokens on the host. Scheduling and streaming are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from bench import PROGRAM
from ops.machine import Machine
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import Progress, parse
from serve.bench.options import add_output_options, new_parser

if TYPE_CHECKING:
    from runtime.batch import Batch
    from runtime.config import Args
    from runtime.config.model_facts import ModelFacts
    from runtime.kv_cache.pools import KVPool
    from runtime.worker.model_runner import ModelRunner

FIRST_TOKEN = 3  # any id will do


class Pair(NamedTuple):
    """One batch size with both kernels."""

    batch_size: int
    native_ms: tuple[float, ...]
    chosen_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times faster the chosen kernels are, by medians."""
        return median(self.native_ms) / median(self.chosen_ms)


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "step",
        "Time single steps of the model. Every other option is the engine's: --model-path DIR ...",
        program=PROGRAM,
    )
    group = options.add_argument_group("batch")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="rows")
    group.add_argument("--context-len", type=int, default=128, help="tokens of each row already in the cache")
    group.add_argument("--new-len", type=int, default=1, help="tokens that each row computes; 1 is decoding")
    group.add_argument("--repetitions", type=int, default=30, help="of each, after two that are not measured")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    sizes = [*options.batch_size, options.new_len, options.repetitions, options.context_len + 1]
    if min(sizes) < 1:
        raise ConfigurationError("Every size must be at least 1, --context-len at least 0.")
    facts, plan = one_process_plan(args)
    pairs = anyio.run(_measure, options, facts, plan)
    report.say(_render(options, plan, pairs))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords(), "kernels": plan.kernels.choices}
        results = {"pairs": [{**report.plain(pair), "ratio": pair.ratio} for pair in pairs]}
        report.write(options.output_file, report.document("step", settings, results, argv=argv, program=PROGRAM))
    return 0


def one_process_plan(args: Args) -> tuple[ModelFacts, Plan]:
    """What the engine's options come to, without other processes."""
    from runtime.config.resolve import check, resolve
    from runtime.loading.checkpoint import locate
    from runtime.loading.facts import read_facts

    machine = Machine.probe()
    directory = locate(check(args, machine), args.model.revision, args.model.download_dir)
    facts = read_facts(directory, args.model.json_model_override_args)
    plan = resolve(args, machine, facts)
    if plan.parallel.ranks * plan.parallel.dp_size > 1:
        raise ConfigurationError("A step is timed in one process: leave out --tp-size, --pp-size and --dp-size.")
    return facts, plan


async def _measure(options: argparse.Namespace, facts: ModelFacts, plan: Plan) -> list[Pair]:
    rows, length = max(options.batch_size), options.context_len + options.new_len
    runners = [
        _runner(facts, plan, choices, rows, length) for choices in ({"attention": "native"}, plan.kernels.choices)
    ]
    pairs = []
    try:
        with Progress(len(options.batch_size), "batch sizes") as progress:
            for size in options.batch_size:
                batch = make_batch(size, options.context_len, options.new_len, plan.cache.page_size)
                times: list[list[float]] = [[], []]
                for _ in range(2 + options.repetitions):
                    for runner, taken in zip(runners, times):
                        began = perf_counter()
                        await asyncio.shield(runner.launch(batch))
                        taken.append(1e3 * (perf_counter() - began))
                pairs.append(Pair(size, *(tuple(taken[2:]) for taken in times)))
                progress.advance()
    finally:
        for runner in runners:
            runner.close()
    return pairs


def _runner(facts: ModelFacts, plan: Plan, choices: Mapping[str, str], num_rows: int, length: int) -> ModelRunner:
    """A runner with these kernels and room for `num_rows` rows of `length` tokens."""
    import torch

    from ops.cpp.kernel_launcher import NotCapturable
    from ops.select import select
    from runtime.loading.loader import load_model
    from runtime.worker.cpu_graph import CpuGraph
    from runtime.worker.device import open_device
    from runtime.worker.model_runner import ModelRunner, StepExecutor
    from runtime.worker.sampler import Sampler

    device = plan.model.device
    pool = written_pool(facts, plan, num_rows, length)
    kernels = select(choices, plan.kernels.settings)
    model = load_model(facts, plan.model, kernels)
    sampler = Sampler(
        facts.vocab_size,
        num_rows,
        open_device(torch.device(device)),
        choose=kernels.choose,
        penalize=kernels.penalize,
        score=kernels.score,
    )
    graph = None
    if kernels.launcher is not None:
        try:
            graph = CpuGraph(model, pool, kernels, num_rows * length, num_rows)
        except NotCapturable as reason:
            report.say(f"Steps are computed operation by operation: {reason}.")
    launcher = StepExecutor(
        model,
        pool,
        model,
        num_sequences=num_rows,
        device=open_device(torch.device(device)),
        sampler=sampler,
        cpu_graph=graph,
    )
    return ModelRunner(launcher)


def written_pool(facts: ModelFacts, plan: Plan, num_rows: int, length: int) -> KVPool:
    """A cache with room for `num_rows` rows of `length` tokens, all of it random numbers.

    Memory of a CPU that nobody has written is one page of zeros many times over, which stays in the nearest cache and
    would make attention look faster than it is.
    """
    import torch

    from runtime.kv_cache.pools import KVPool

    size, dtype = plan.cache.page_size, getattr(torch, plan.cache.kv_dtype)
    num_pages = num_rows * -(-length // size)
    pool = KVPool.uniform(
        facts.num_layers, num_pages, size, facts.num_kv_heads, facts.head_dim, dtype, plan.model.device
    )
    for layer in pool.values():
        for page in (*layer.k, *layer.v):
            page.copy_(torch.randn(page.shape))
    return pool


def make_batch(num_rows: int, context_len: int, new_len: int, page_size: int) -> Batch:
    """Rows with pages of their own that compute `new_len` tokens each and choose one greedily.

    What is cached of them differs by up to a page, as it does in life.
    """
    import numpy as np

    from runtime.batch import Batch, Sampling

    pages = -(-(context_len + new_len) // page_size)
    nothing: Any = None  # the runner never looks inside a sequence
    return Batch(
        number=0,
        sequences=(nothing,) * num_rows,
        starts=np.maximum(0, context_len - np.arange(num_rows, dtype=np.int32) % page_size),
        counts=np.full(num_rows, new_len, np.int32),
        sequence_indices=np.arange(num_rows, dtype=np.int32),
        token_ids=np.full(num_rows * new_len, FIRST_TOKEN, np.int32),
        page_table=np.arange(num_rows * pages, dtype=np.int32).reshape(num_rows, pages),
        sampling=Sampling(
            positions=np.arange(1, num_rows + 1, dtype=np.int32) * new_len - 1,
            row_of=np.arange(num_rows, dtype=np.int32),
            greedy=np.ones(num_rows, np.bool_),
            uniform=np.zeros(num_rows, np.float32),
        ),
    )


def _render(options: argparse.Namespace, plan: Plan, pairs: Sequence[Pair]) -> str:
    import torch

    heading: list[report.Row] = [
        ("dtype", plan.model.dtype),
        ("kernels", ", ".join(f"{operation} {name}" for operation, name in plan.kernels.choices.items())),
        ("threads", torch.get_num_threads()),
        ("cached, new tokens a row", f"{options.context_len}, {options.new_len}"),
        ("repetitions", options.repetitions),
    ]
    lines = [report.table("one step, ms", heading)]
    heads = ("rows", "native min", "median", "chosen min", "median", "ratio")
    lines.append("".join(f"{head:>12}" for head in heads))
    for pair in pairs:
        figures = (f(times) for times in (pair.native_ms, pair.chosen_ms) for f in (min, median))
        cells = [str(pair.batch_size), *(f"{figure:,.2f}" for figure in figures), f"{pair.ratio:.2f}"]
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
