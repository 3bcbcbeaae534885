"""Measure simultaneous streamed requests over HTTP, as a server's clients see them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import anyio
import orjson

from bench.cpu.work import OUTPUT, STREAM_FIGURES, Ids, WorkError
from serve.bench.client import Client, ExchangeError, Response
from serve.bench.load import drive
from serve.bench.metrics import Outcome, measure
from serve.bench.protocol import BACKENDS, RequestDefaults, failed, observe
from serve.bench.workload import Prompt, Vocabulary

BACKEND = BACKENDS["openai"]


def stream_all(url: str, prompts: Sequence[Ids], vocabulary: Vocabulary, *, as_text: bool) -> dict[str, float]:
    """Return the streaming figures by name. Raises `WorkError` if a stream fails.

    With `as_text`, for servers that do not accept ids, prompts are texts with nearly the same number of tokens.
    """
    asked = [_prompt(ids, vocabulary, as_text) for ids in prompts]
    uvloop = {"use_uvloop": sys.platform != "win32"}
    try:
        outcomes, duration_s = anyio.run(_stream, url, asked, vocabulary, backend_options=uvloop)
    except ExchangeError as error:
        raise WorkError(str(error)) from error
    return figures(outcomes, duration_s)


def figures(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, float]:
    results = measure(outcomes, duration_s)
    if results.failed or results.ttft_ms is None or results.itl_ms is None:
        raise WorkError(f"a stream failed: {', '.join(results.errors) or 'no tokens'}")
    first, gap = results.ttft_ms, results.itl_ms
    values = (results.output_tokens_per_s, first.median, first.p99, gap.median, gap.p99)
    return {figure.name: value for figure, value in zip(STREAM_FIGURES, values)}


def _prompt(ids: Ids, vocabulary: Vocabulary, as_text: bool) -> Prompt:
    if as_text:
        return Prompt(text=vocabulary.text_of(ids), prompt_tokens=len(ids), output_tokens=OUTPUT)
    return Prompt(ids=tuple(ids), prompt_tokens=len(ids), output_tokens=OUTPUT)


async def _stream(url: str, prompts: Sequence[Prompt], vocabulary: Vocabulary) -> tuple[list[Outcome], float]:
    async with Client(url) as client:
        listed = orjson.loads((await client.get("/v1/models")).body)
        defaults = RequestDefaults(model=listed["data"][0]["id"])
        await client.connect(len(prompts))
        bodies = {id(prompt): orjson.dumps(BACKEND.request_body(prompt, defaults)) for prompt in prompts}

        async def send(prompt: Prompt, start_s: float) -> _Answer:
            sent_s = perf_counter()
            try:
                response = await client.post(BACKEND.path, bodies[id(prompt)])
            except ExchangeError as error:
                return _Answer(prompt, sent_s, start_s, perf_counter(), str(error))
            return _Answer(prompt, sent_s, start_s, response.ended_s, response)

        answers, duration_s = await drive(prompts, [0.0] * len(prompts), send)
    # after the measurement, because decoding the events takes as long as several steps of a small model
    return [_outcome(answer, vocabulary) for answer in answers], duration_s


class _Answer(NamedTuple):
    """The undecoded outcome of one prompt."""

    prompt: Prompt
    sent_s: float
    start_s: float
    ended_s: float
    what: Response | str  # the response, or the reason why there is none


def _outcome(answer: _Answer, vocabulary: Vocabulary) -> Outcome:
    prompt, sent_s, start_s, ended_s, what = answer
    if isinstance(what, str):
        return failed(prompt, what, sent_s=sent_s, ended_s=ended_s, start_s=start_s)
    return observe(prompt, what, BACKEND, sent_s=sent_s, start_s=start_s, count=vocabulary.count)
