"""`latency`: measure one batch alone in the engine.

The results are the prefill time of its prompts, and the decode time per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import anyio

from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import Progress, generate_arguments, model_vocabulary, parse, run_with_engine
from serve.bench.metrics import summarize
from serve.bench.options import add_output_options, new_parser, read_vocabulary
from serve.bench.workload import Prompt, SharedPrefixes, Vocabulary, shared_prefix_prompts

if TYPE_CHECKING:
    from serve import Engine


class Repetition(NamedTuple):
    """Times of one run of the batch."""

    prefill_s: float  # seconds until every sequence has its first token
    decode_s: float  # seconds from the end of `prefill_s` until every output is complete
    decode_token_s: float  # seconds per token of one sequence while decoding
    prompt_tokens: int  # prompt tokens of the whole batch
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / (self.prefill_s + self.decode_s)


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "latency",
        "Measure one batch in this process. All other options are engine options: --model-path DIR ...",
    )
    group = options.add_argument_group("batch")
    group.add_argument("--batch-size", type=int, default=1)
    group.add_argument("--input-len", type=int, default=1024, help="tokens")
    group.add_argument("--output-len", type=int, default=128, help="tokens, at least 2")
    group.add_argument("--repetitions", type=int, default=5, help="measured runs, after one unmeasured run")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--tokenizer", help="tokenizer.json or its directory; default: random ids of the model")
    group.add_argument("--vocab-size", type=int, help="draw random ids in [0, N)")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    if options.batch_size < 1 or options.repetitions < 1 or options.output_len < 2:
        raise ConfigurationError("--batch-size and --repetitions must be at least 1, --output-len at least 2.")
    vocabulary = read_vocabulary(options) or model_vocabulary(args.get("model_path"))
    if vocabulary is None:
        raise ConfigurationError("The model is not a local directory: set --tokenizer or --vocab-size.")
    batches = draw_batches(options, vocabulary)

    async def work(engine: Engine) -> list[Repetition]:
        await time_batch(engine, batches[0])
        measured = []
        with Progress(options.repetitions, "repetitions") as progress:
            for batch in batches[1:]:
                measured.append(await time_batch(engine, batch))
                progress.advance()
        return measured

    repetitions = run_with_engine(args, work)
    report.say(_render(options, repetitions))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords()}
        report.write(options.output_file, report.document("latency", settings, {"repetitions": repetitions}, argv=argv))
    return 0


def draw_batches(options: argparse.Namespace, vocabulary: Vocabulary) -> list[list[Prompt]]:
    """Return one warm-up batch, and one batch per repetition. All prompts differ, so that none is in the cache."""
    size = options.batch_size
    shape = SharedPrefixes(
        groups=size * (options.repetitions + 1),
        prompts_per_group=1,
        system_prompt_tokens=0,
        question_tokens=options.input_len,
        output_tokens=options.output_len,
    )
    prompts = shared_prefix_prompts(shape, options.seed, vocabulary, as_text=False)
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


async def time_batch(engine: Engine, batch: Sequence[Prompt]) -> Repetition:
    """Run one batch, and return its times. Raises the engine's errors."""
    start_s = perf_counter()
    first_s, last_s, num_prompt, num_output = start_s, start_s, 0, 0

    async def follow(prompt: Prompt) -> None:
        nonlocal first_s, last_s, num_prompt, num_output
        meta = None
        async for answer in engine.stream(**generate_arguments(prompt)):
            if meta is None:
                first_s = max(first_s, perf_counter())
            meta = answer["meta_info"]
        last_s = max(last_s, perf_counter())
        if meta is not None:
            num_prompt += meta["prompt_tokens"]
            num_output += meta["completion_tokens"]

    async with anyio.create_task_group() as group:
        for prompt in batch:
            group.start_soon(follow, prompt)
    decode_s = last_s - first_s
    per_token_s = decode_s / max(num_output / len(batch) - 1, 1)
    return Repetition(first_s - start_s, decode_s, per_token_s, num_prompt, num_output)


def _render(options: argparse.Namespace, repetitions: Sequence[Repetition]) -> str:
    rows: list[report.Row] = [
        ("batch size", options.batch_size),
        ("input tokens each", options.input_len),
        ("output tokens each", options.output_len),
        ("repetitions", len(repetitions)),
    ]
    figures = {
        "prefill (ms)": summarize((one.prefill_s for one in repetitions), 1e3),
        "prefill (tokens/s)": summarize(one.prompt_tokens / one.prefill_s for one in repetitions),
        "decode per token (ms)": summarize((one.decode_token_s for one in repetitions), 1e3),
        "decode (tokens/s)": summarize((one.output_tokens - options.batch_size) / one.decode_s for one in repetitions),
        "in and out (tokens/s)": summarize(one.tokens_per_s for one in repetitions),
    }
    return report.table("latency of one batch", rows, figures, heads=("min", "median", "max"))
