"""`serving`: measure the latency and throughput of a server over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from urllib.request import Request, urlopen

import anyio
import orjson

from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.client import Client, ExchangeError
from serve.bench.load import Progress, drive
from serve.bench.metrics import Outcome, Results, measure, parse_objectives
from serve.bench.options import (
    add_dataset_options,
    add_output_options,
    build_prompts,
    build_warmup,
    new_parser,
    read_vocabulary,
)
from serve.bench.protocol import BACKENDS, RequestDefaults, failed, observe
from serve.bench.workload import Prompt, Vocabulary, arrival_times

BUSY_CLIENT = 0.8  # if the client uses a larger fraction of a core, it may be the bottleneck
NUM_SHOWN_ERRORS = 3
ASK_TIMEOUT_S = 10.0
MAX_INFO_BYTES = 2**20


def parser() -> argparse.ArgumentParser:
    options = new_parser("serving", "Measure a running server over HTTP.")
    server = options.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:30000")
    server.add_argument("--backend", choices=tuple(BACKENDS), default="openai-chat")
    server.add_argument("--model", help="default: the first one of /v1/models")
    server.add_argument("--api-key", help="sent as a bearer token; never written to the result")
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    server.add_argument("--extra-request-body", default="{}", metavar="JSON", help="merged over every request")
    server.add_argument(
        "--disable-ignore-eos", action="store_true", help="let outputs end with the end-of-sequence token"
    )
    server.add_argument("--request-timeout-s", type=float, default=3600.0)
    load = options.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"), help="requests per second")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: a Poisson process; less: burstier")
    load.add_argument("--max-concurrency", type=int, help="maximum number of concurrent requests")
    load.add_argument(
        "--warmup-requests", type=int, default=1, help="unmeasured requests that are sent first, one by one"
    )
    load.add_argument("--flush-cache", action="store_true", help="POST /flush_cache after the warm-up")
    load.add_argument("--send", choices=("auto", "ids", "text"), default="auto", help="format of generated prompts")
    add_dataset_options(options)
    add_output_options(options)
    options.add_argument("--output-details", action="store_true", help="per-request arrays in the result")
    options.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft:500 tpot:50 e2e:9000")
    options.add_argument("--disable-progress", action="store_true")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 0, or 1 if no request succeeded."""
    options = parser().parse_args(argv)
    run = ServingRun(options)
    uvloop = {"use_uvloop": sys.platform != "win32"}
    outcomes, duration_s, client_share = anyio.run(run.measure, backend_options=uvloop)
    results = measure(outcomes, duration_s, run.objectives)
    report.say(_render(options, results, client_share))
    if options.output_file:
        figures = {**report.plain(results), "client_cpu_share": client_share}
        details = outcomes if options.output_details else None
        settings = {**vars(options), "model": run.defaults.model, "request_rate": str(options.request_rate)}
        report.write(options.output_file, report.document("serving", settings, figures, details, argv))
    return 0 if results.completed else 1


class ServingRun:
    """One run: builds the workload, sends its prompts, and measures the answers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.backend = BACKENDS[options.backend]
        self.objectives = parse_objectives(options.goodput)
        if options.max_concurrency is not None and options.max_concurrency < 1:
            raise ConfigurationError("--max-concurrency must be at least 1.")
        self.headers = _headers(options.header, options.api_key)
        self.vocabulary = read_vocabulary(options) or served_vocabulary(options.base_url, self.headers)
        as_text = _sends_text(options.send, self.backend.takes_ids, self.vocabulary)
        self.prompts = build_prompts(options, self.vocabulary, as_text=as_text)
        self.warmup = build_warmup(options, self.prompts, self.vocabulary, options.warmup_requests, as_text=as_text)
        self.arrivals_s = arrival_times(len(self.prompts), options.request_rate, options.burstiness, options.seed)
        self.defaults = RequestDefaults(
            model=options.model,
            ignore_eos=not options.disable_ignore_eos,
            extra=_json_object("--extra-request-body", options.extra_request_body),
        )
        for prompt in self.prompts:  # raises for invalid prompts before the first request is sent
            self.backend.request_body(prompt, self.defaults)

    async def measure(self) -> tuple[list[Outcome], float, float]:
        """Send all prompts. Returns (outcomes, duration in seconds, fraction of a core that this client used)."""
        async with Client(self.options.base_url, self.headers) as client:
            await self._prepare(client)

            async def send(prompt: Prompt, start_s: float) -> Outcome:
                return await self._send(client, prompt, start_s)

            shown = 0 if self.options.disable_progress else len(self.prompts)
            with Progress(shown, "requests") as progress:
                cpu_s = process_time()
                outcomes, duration_s = await drive(
                    self.prompts,
                    self.arrivals_s,
                    send,
                    max_concurrency=self.options.max_concurrency,
                    progress=progress,
                )
                cpu_s = process_time() - cpu_s
        return outcomes, duration_s, cpu_s / duration_s

    async def _prepare(self, client: Client) -> None:
        if self.defaults.model is None and self.options.backend != "native":
            self.defaults = replace(self.defaults, model=await _first_model(client))
        for prompt in self.warmup:
            outcome = await self._send(client, prompt, perf_counter())
            if outcome.error is not None:
                raise ConfigurationError(f"The warm-up request failed: {outcome.error}")
        if self.options.flush_cache:
            response = await client.post("/flush_cache", b"")
            if response.status != 200:
                raise ConfigurationError(f"POST /flush_cache was answered with status {response.status}.")

    async def _send(self, client: Client, prompt: Prompt, start_s: float) -> Outcome:
        body = orjson.dumps(self.backend.request_body(prompt, self.defaults))
        sent_s = perf_counter()
        try:
            with anyio.fail_after(self.options.request_timeout_s):
                response = await client.post(self.backend.path, body)
        except ExchangeError as error:
            return failed(prompt, str(error), sent_s=sent_s, ended_s=perf_counter(), start_s=start_s)
        except TimeoutError:
            text = f"no complete answer within {self.options.request_timeout_s:g} s"
            return failed(prompt, text, sent_s=sent_s, ended_s=perf_counter(), start_s=start_s)
        vocabulary = self.vocabulary
        count = vocabulary.count if vocabulary is not None and vocabulary.has_text else None
        return observe(prompt, response, self.backend, sent_s=sent_s, start_s=start_s, count=count)


def _sends_text(send: str, takes_ids: bool, vocabulary: Vocabulary | None) -> bool:
    """Whether generated prompts are sent as text instead of token ids.

    By default, token ids are sent if the server accepts them, so that the server does not tokenize. Raises
    `ConfigurationError` if --send cannot be satisfied.
    """
    if send == "ids" and not takes_ids:
        raise ConfigurationError("--backend openai-chat accepts messages, not token ids: use --send text.")
    if send == "text" and (vocabulary is None or not vocabulary.has_text):
        raise ConfigurationError(
            "--send text requires --tokenizer, because the server names no tokenizer on this machine."
        )
    return send == "text" or not takes_ids


def served_vocabulary(base_url: str, headers: Mapping[str, str]) -> Vocabulary | None:
    """Return the vocabulary of the server's tokenizer if /get_model_info names a local folder or file, else None."""
    if not base_url.startswith(("http://", "https://")):
        return None
    request = Request(f"{base_url.rstrip('/')}/get_model_info", headers=dict(headers))
    try:
        with urlopen(request, timeout=ASK_TIMEOUT_S) as response:
            info = orjson.loads(response.read(MAX_INFO_BYTES))
    except (OSError, ValueError, HTTPException):  # another kind of server, or no server: then the first request fails
        return None
    found = info.get("tokenizer_path") if isinstance(info, dict) else None
    if not isinstance(found, str) or not found:
        return None
    folder = Path(found)
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    return Vocabulary.of_tokenizer(found) if file.is_file() and file.suffix == ".json" else None


def _headers(pairs: Sequence[str], api_key: str | None) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError("--header must have the form NAME=VALUE.")
        headers[name.strip()] = value.strip()
    return headers


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{option} is not JSON.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option} must be a JSON object.")
    return value


async def _first_model(client: Client) -> str:
    try:
        response = await client.get("/v1/models")
        listed = orjson.loads(response.body) if response.status == 200 else {}
    except ExchangeError as error:
        raise ConfigurationError(f"The server does not answer: {error}.") from error
    except orjson.JSONDecodeError:
        listed = {}
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not cards:
        raise ConfigurationError("The server lists no model at /v1/models: set --model.")
    return cards[0]["id"]


def _render(options: argparse.Namespace, results: Results, client_share: float) -> str:
    rows: list[report.Row] = [
        ("backend", options.backend),
        ("request rate (1/s)", str(options.request_rate)),
        ("allowed concurrency", options.max_concurrency),
        ("duration (s)", results.duration_s),
        ("succeeded", results.completed),
        ("failed", results.failed),
        *report.throughput(results),
        ("concurrency, mean", results.mean_concurrency),
        ("concurrency, peak", results.peak_concurrency),
        (f"goodput ({' '.join(options.goodput)}) requests/s", results.goodput_requests_per_s),
    ]
    latencies = {
        "TTFT (ms)": results.ttft_ms,
        "ITL (ms)": results.itl_ms,
        "TPOT (ms)": results.tpot_ms,
        "end to end (ms)": results.e2e_ms,
    }
    lines = [report.table("serving benchmark", rows, latencies)]
    ordered = sorted(results.errors.items(), key=lambda pair: -pair[1])
    lines += [f"error, {number} times: {text}" for text, number in ordered[:NUM_SHOWN_ERRORS]]
    if client_share > BUSY_CLIENT:
        lines.append(f"warning: this client used {client_share:.0%} of a core; it may be the bottleneck")
    return "\n".join(lines)
