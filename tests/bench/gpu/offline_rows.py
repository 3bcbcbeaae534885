"""Rows that call the engine directly: a single decoding request, and workloads that are submitted at once."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.gpu.bench import SEED, Bench, Model, warm_up
from bench.gpu.figure import Figure
from bench.gpu.limits import Job
from serve.bench.latency import Repetition, time_batch
from serve.bench.metrics import Results, measure
from serve.bench.offline import throughput
from serve.bench.workload import (
    Prompt,
    RandomLengths,
    SharedPrefixes,
    random_prompts,
    shared_prefix_prompts,
)
from serve.python.engine import Engine

# Requests send and receive ids, because the device is measured and not the tokenizer.
IDS_ONLY = {"skip_tokenizer_init": True}


def decode(bench: Bench) -> list[Figure]:
    """Tokens per second of a single request after its first token."""
    model, (length, output) = bench.model("llama-3.1-8b"), bench.sizes.decode
    shape = SharedPrefixes(
        groups=bench.sizes.repetitions + 1,
        prompts_per_group=1,
        system_prompt_tokens=0,
        question_tokens=length,
        output_tokens=output,
    )
    prompts = shared_prefix_prompts(shape, SEED, model.vocabulary, as_text=False)

    async def work(engine: Engine) -> list[Repetition]:
        await warm_up(engine, model, 1)
        return [await time_batch(engine, [prompt]) for prompt in prompts][1:]

    token_s = median(one.decode_token_s for one in bench.run(model, work, **IDS_ONLY))
    least = bench.cost(model).decode([length + output / 2])
    return [
        Figure(
            f"one request decodes, {length} tokens in, {output} out",
            model.name,
            1 / token_s,
            "tokens/s",
            1 / bench.limits.seconds(least),
            bench.limits.bound(least),
        )
    ]


def offline(bench: Bench) -> list[Figure]:
    """Output tokens per second of equal requests that are submitted at once."""
    model, (requests, length, output) = bench.model("qwen3-8b"), bench.sizes.offline
    lengths = RandomLengths(input_tokens=length, output_tokens=output, range_ratio=1.0)
    prompts = random_prompts(lengths, requests, SEED, model.vocabulary, as_text=False)
    what = f"{requests} requests at once, {length} tokens in, {output} out"
    return _throughput(bench, model, prompts, what)


def mixed(bench: Bench) -> list[Figure]:
    """Output tokens per second of requests with random lengths."""
    model, (requests, low, high) = bench.model("qwen3-0.6b"), bench.sizes.mixed
    # Half a token is added, so that the product is not rounded down to the next lower length.
    lengths = RandomLengths(input_tokens=high, output_tokens=high, range_ratio=(low + 0.5) / high)
    prompts = random_prompts(lengths, requests, SEED, model.vocabulary, as_text=False)
    what = f"{requests} requests at once, {low} to {high} tokens in and out"
    return _throughput(bench, model, prompts, what)


def prefix(bench: Bench) -> list[Figure]:
    """Requests in groups with a shared prefix."""
    model, (groups, each) = bench.model("qwen3-8b"), bench.sizes.groups
    shared, own, output = bench.sizes.prefix
    shape = SharedPrefixes(
        groups=groups,
        prompts_per_group=each,
        system_prompt_tokens=shared,
        question_tokens=own,
        output_tokens=output,
    )
    prompts = shared_prefix_prompts(shape, SEED, model.vocabulary, as_text=False)
    what = f"{groups} x {each} requests at once, {shared} tokens shared, {own} own, {output} out"
    return _throughput(bench, model, prompts, what, groups=groups, shared=shared)


def _throughput(
    bench: Bench, model: Model, prompts: Sequence[Prompt], what: str, *, groups: int = 0, shared: int = 0
) -> list[Figure]:
    async def work(engine: Engine) -> Results:
        await warm_up(engine, model, len(prompts))
        return measure(*await throughput(engine, prompts))

    results = bench.run(model, work, **IDS_ONLY)
    jobs = [Job(prompt.prompt_tokens or 0, prompt.output_tokens, shared) for prompt in prompts]
    least = bench.cost(model).all_at_once(jobs, groups)
    highest = sum(job.output for job in jobs) / bench.limits.seconds(least)
    figures = [
        Figure(
            what,
            model.name,
            results.output_tokens_per_s,
            "output tokens/s",
            highest,
            bench.limits.bound(least),
        )
    ]
    if groups:
        found = 100 * (results.cached_tokens or 0) / results.input_tokens
        most = 100 * shared * (len(jobs) - groups) / results.input_tokens
        figures.append(Figure(f"{what}: prompt tokens from the cache", model.name, found, "%", most, "what is shared"))
    return figures
