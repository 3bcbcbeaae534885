"""Compare the time to first token of prefill and decode servers with that of one server, in turns.

Each prompt is new to all servers. The first token of an ordinary server with the same number of threads gives the
prefill time, and a bare transfer gives the time to send the pages' bytes. In the remaining time, pages are copied,
checked and restored, and the tokens after the last full page are computed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import median
from time import perf_counter

import httpx

from bench import PROGRAM
from runtime.loading.facts import read_facts
from serve.bench.options import new_parser
from serve.demo import demo_path
from server_process import serving

COMMON = ("--random-seed", "1", "--max-total-tokens", "32768")
PAUSE_S = 0.05  # pause between two requests, in which the work of the last one ends
NUM_OUTPUT = 4  # output tokens of each request
WARM_UP = 4  # rounds that are not counted
TRANSFERS = 9  # bare transfers of each size
# Form -> the form whose time to first token counts as its prefill time. The replicas of one process share its cores.
FORMS = {
    "one server": "one server",
    "two servers and a router": "one server",
    "one server with half the threads": "one server with half the threads",
    "replicas of one process": "one server with half the threads",
}


def main(words: Sequence[str]) -> int:
    """Print the table of the study."""
    parser = new_parser("prefill-decode", "First tokens with prompts computed elsewhere.", program=PROGRAM)
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 1500], help="default 512 1500")
    parser.add_argument("--rounds", type=int, default=12, help="measured prompts of each length (default 12)")
    options = parser.parse_args(list(words))
    model = ("--model-path", options.model_path) if options.model_path else ()
    facts = read_facts(options.model_path or str(demo_path()))
    if (longest := max(options.prompt_tokens) + NUM_OUTPUT) > facts.context_length:
        model += ("--json-model-override-args", json.dumps({"max_position_embeddings": longest}))
    token_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * 2  # keys and values of two bytes
    with _servers((*COMMON, *model)) as urls:
        rows = asyncio.run(_measure(urls, options.prompt_tokens, options.rounds, token_bytes))
    print("prompt tokens | served by | first token, ms | prefill, ms | transfer, ms | beyond both, ms | cached tokens")
    for row in rows:
        print(" | ".join(row))
    return 0


@contextmanager
def _servers(common: Sequence[str]) -> Iterator[list[str]]:
    """Start the servers, and yield the address of each of `FORMS`."""
    ports = [_free_port() for _ in range(3)]
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(ports[0]))
    decode = ("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{ports[0]}")
    replicas = ("--dp-size", "2", "--disaggregation-prefill-replicas", "1")
    with ExitStack() as stack:

        def start(*options: str, **environment: str) -> str:
            return stack.enter_context(serving(*common, *options, **environment)).url

        plain, urls = start(), (start(*prefill), start(*decode))
        router = ("router", "--prefill", urls[0], "--decode", urls[1])
        port = str(ports[1])
        stack.enter_context(_router(*router, "--port", port))
        half = start(OMP_NUM_THREADS=str(max(1, len(os.sched_getaffinity(0)) // 2)))
        both = start(*replicas, "--disaggregation-bootstrap-port", str(ports[2]))
        yield [plain, f"http://127.0.0.1:{port}", half, both]


@contextmanager
def _router(*words: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "serve", *words], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


async def _measure(urls: Sequence[str], lengths: Sequence[int], rounds: int, token_bytes: int) -> list[tuple[str, ...]]:
    random, rows = Random(5), []
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        for url in urls:
            await _reached(client, url)
        for length in lengths:
            times: dict[str, list[float]] = {form: [] for form in FORMS}
            cached: dict[str, int] = {}
            for number in range(WARM_UP + rounds):
                for form, url in zip(FORMS, urls, strict=True):
                    ids = [random.randrange(10, 4000) for _ in range(length)]
                    seconds, cached[form] = await _first_token(client, url, ids)
                    if number >= WARM_UP:
                        times[form].append(seconds)
                    await asyncio.sleep(PAUSE_S)
            for form, prefill in FORMS.items():
                parts = [median(times[form]), median(times[prefill]), _transfer_s(cached[form] * token_bytes)]
                beyond = parts[0] - parts[1] - parts[2]
                texts = (*(f"{part * 1e3:.1f}" for part in parts), f"{beyond * 1e3:+.1f}", str(cached[form]))
                rows.append((str(length), form, *texts))
    return rows


def _transfer_s(size: int) -> float:
    """Return the seconds to send `size` bytes over a connection on 127.0.0.1, as the median of several transfers."""
    data, received, times = bytes(size), memoryview(bytearray(size)), []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver, ThreadPoolExecutor(1) as thread:
            for _ in range(TRANSFERS):
                began, start = perf_counter(), 0
                sent = thread.submit(sender.sendall, data)
                while start < size:
                    start += receiver.recv_into(received[start:])
                sent.result()
                times.append(perf_counter() - began)
    return median(times)


async def _reached(client: httpx.AsyncClient, url: str) -> None:
    while True:
        try:
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)


async def _first_token(client: httpx.AsyncClient, url: str, ids: Sequence[int]) -> tuple[float, int]:
    """Return the seconds until the first token, and the number of cached prompt tokens."""
    sampling = {"max_new_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    began, seconds, num_cached = perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not seconds:
                seconds = perf_counter() - began
                num_cached = json.loads(line[6:])["meta_info"]["cached_tokens"]
    return seconds, num_cached
