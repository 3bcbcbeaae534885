"""`images`: compare image prompts with transformers and cached images; measure the event loop's lag under load."""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers

import tiny_checkpoints
import tiny_seeing
from bench import PROGRAM
from bench.loopback import serve_on_loopback
from runtime.media_source import MediaSource
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.bench import report
from serve.bench.options import new_parser
from serve.server.process import SWITCH_S

FAMILY = "idefics3"  # SmolVLM's family; an image is one tile of NUM_TOKENS tokens
SIDE, NUM_TOKENS = 512, 64
TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49_280, "max_position_embeddings": 8192,
}  # fmt: skip
EYES = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "image_size": SIDE, "patch_size": 16}
PROMPT = "Once <image> upon a time" + " and then" * 20
ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
LAG_FAMILY, LAG_SIZE = "qwen2_vl", (1024, 768)
TICK_S, IDLE_S = 0.001, 2.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = new_parser("images", "Image prompts against transformers, and the event loop's lag.", program=PROGRAM)
    options.add_argument("--rounds", type=int, default=5, help="rounds, in each of which every case is timed once")
    options.add_argument("--layers", type=int, default=12, help="layers of the text model (SmolVLM-256M: 30)")
    options.add_argument("--eye-layers", type=int, default=12, help="layers of the image encoder (SmolVLM-256M: 12)")
    options.add_argument("--images", type=int, default=100, help="images in flight while the lag is measured")
    options.add_argument("--only", choices=("speed", "lag"), help="measure only this")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, print its figures, and return the exit status."""
    args = parser().parse_args(argv)
    if args.only != "speed":
        asyncio.run(_lag(args.images))
    if args.only != "lag":
        asyncio.run(_speed(args))
    return 0


# --- time to the first token ---


def _write(folder: Path, layers: int, eye_layers: int) -> None:
    """Write a random checkpoint whose layers have the shape of SmolVLM-256M."""
    family = tiny_seeing.FAMILIES[FAMILY]
    tiny_seeing.write(folder, FAMILY)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {short: tokenizer.convert_tokens_to_ids(token) for short, token in family.tokens.items()}
    config = family.config(ids, {**TEXT, "num_hidden_layers": layers})
    config.vision_config = type(config.vision_config)(**EYES, num_hidden_layers=eye_layers)
    config.scale_factor = 4
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.bfloat16)
    tiny_checkpoints.redraw(model, 0)
    model.to(torch.bfloat16).save_pretrained(folder)
    size = {"longest_edge": SIDE}
    images = {"size": size, "max_image_size": size, "do_image_splitting": False, **tiny_seeing.NORM}
    named = family.image_processor.removesuffix("Pil")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": named, **images}))
    more = {"processor_class": family.processor, **family.options, "image_seq_len": NUM_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(more))


def _processor_of(path: str) -> Any:
    auto: Any = transformers.AutoImageProcessor
    images = auto.from_pretrained(path, size={"longest_edge": SIDE})
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    kind: Any = getattr(transformers, tiny_seeing.FAMILIES[FAMILY].processor)
    return kind(images, tokenizer, image_seq_len=NUM_TOKENS)


async def _speed(args: argparse.Namespace) -> None:
    """Print the time to the first token of a new image, of a cached image, and of a text of the same length."""
    with TemporaryDirectory(prefix="penstock-images-") as folder:
        _write(Path(folder), args.layers, args.eye_layers)
        auto: Any = transformers.AutoModelForImageTextToText
        model = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
        processor = _processor_of(folder)
        times: dict[str, list[float]] = {"transformers": [], "Penstock": [], "image cached": [], "text": []}
        async with Engine(folder, dtype="bfloat16", max_total_tokens=8192, random_seed=1) as engine:
            for number in range(args.rounds + 1):
                took = await _round(engine, model, processor, number)
                if number:  # the first round warms up
                    for each, seconds in zip(times.values(), took, strict=True):
                        each.append(seconds)
    middle = {name: median(each) for name, each in times.items()}
    each_ms = {name: " ".join(f"{1e3 * seconds:.0f}" for seconds in each) for name, each in times.items()}
    rows = [(name, f"{1e3 * middle[name]:.0f} ms ({each_ms[name]})") for name in times]
    rows += [
        ("new image, times as fast as transformers", f"{middle['transformers'] / middle['Penstock']:.2f}"),
        ("cached image, times as long as text", f"{middle['image cached'] / middle['text']:.2f}"),
    ]
    title = f"first token, {args.layers} and {args.eye_layers} layers, {torch.get_num_threads()} threads"
    report.say(report.table(title, rows))


async def _round(engine: Engine, model: Any, processor: Any, number: int) -> list[float]:
    """Return four times to the first token: transformers, a new image, the cached image, a text of the same length."""
    image = tiny_seeing.picture(SIDE, SIDE, number)
    began_s = time.perf_counter()
    with torch.inference_mode():
        inputs = processor(text=[PROMPT], images=[image], return_tensors="pt").to(torch.bfloat16)
        model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
    took = [time.perf_counter() - began_s]
    length = inputs["input_ids"].shape[1]
    ids = tuple(3 + (7 * place + number) % 300 for place in range(length))
    seeing = Request(text=PROMPT, media=(MediaSource("object", image),), sampling=ONE)
    for request in (seeing, seeing, Request(ids=ids, sampling=ONE)):
        engine.flush_cache()  # the prefix tree; the encoder's vectors stay
        began_s = time.perf_counter()
        [chunk] = await engine.core.submit(request).whole()
        took.append(time.perf_counter() - began_s)
        if chunk.usage.prompt != length:
            raise RuntimeError(f"The prompts have {length} and {chunk.usage.prompt} tokens.")
    return took


# --- lag of the event loop ---


async def _lag(count: int) -> None:
    """Print the lag of a server's event loop while idle, and while a client sends `count` images at once.

    An idle event loop in a process of its own has the lag that the operating system causes on this machine at the same
    time. The server's own lag is the difference.
    """
    options: dict[str, Any] = {"max_total_tokens": 8192, "dtype": "float32", "random_seed": 1}
    with (
        TemporaryDirectory(prefix="penstock-images-") as folder,
        _other() as client,
        _other() as idle,
        _quick_switches(),
    ):
        files = _write_bodies(Path(folder), count)
        stop = Path(folder) / "stop"
        async with (
            Engine(tiny_seeing.cached(LAG_FAMILY), **options) as engine,
            serve_on_loopback(engine.core) as url,
        ):
            loop = asyncio.get_running_loop()

            async def ask(paths: Sequence[Path]) -> None:
                await loop.run_in_executor(client, _post_all, url, paths)

            async def watch(name: str, work: Any) -> list[tuple[str, str]]:
                stop.unlink(missing_ok=True)
                beside = loop.run_in_executor(idle, _idle_lags, stop)
                try:
                    lags_s, seconds = await _watched(work)
                finally:
                    stop.touch()
                return _rows(name, lags_s, await beside, seconds)

            await ask(files[:2])  # starts the client's process and the server's threads
            await loop.run_in_executor(idle, _idle_lags, files[0])  # starts the idle process
            rows = await watch("no images", asyncio.sleep(IDLE_S))
            rows += await watch("new images", ask(files)) + await watch("cached images", ask(files))
    report.say(report.table(f"lag of the event loop, {count} images in flight over HTTP", rows))


def _rows(name: str, lags_s: Sequence[float], idle_s: Sequence[float], seconds: float) -> list[tuple[str, str]]:
    texts, p99s = [], []
    for each in (lags_s, idle_s):
        ordered = sorted(each)
        p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        p99s.append(p99)
        texts.append(f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {1e3 * ordered[-1]:.1f} ms")
    return [
        (f"{name}, {seconds:.1f} s", texts[0]),
        ("  an idle process", texts[1]),
        ("  p99 over the idle process", f"{p99s[0] - p99s[1]:.2f} ms"),
    ]


def _idle_lags(stop: Path) -> list[float]:
    """Return the lags of an event loop that has nothing to do, until the file exists."""

    async def wait() -> None:
        while not stop.exists():
            await asyncio.sleep(0.02)

    return asyncio.run(_watched(wait()))[0]


async def _watched(work: Any) -> tuple[list[float], float]:
    """Await `work`. Return the lag of each tick of the event loop meanwhile, and the duration of `work`, in seconds."""
    lags_s: list[float] = []

    async def watch() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags_s.append(time.perf_counter() - began_s - TICK_S)

    watching = asyncio.ensure_future(watch())
    began_s = time.perf_counter()
    try:
        await work
    finally:
        watching.cancel()
    return lags_s, time.perf_counter() - began_s


def _write_bodies(folder: Path, count: int) -> list[Path]:
    """Write `count` request bodies, each with a different PNG image, and return their paths."""
    text = f"Once {tiny_seeing.FAMILIES[LAG_FAMILY].placeholder} upon"
    paths: list[Path] = []
    for number in range(count):
        file = base64.b64encode(tiny_seeing.png(tiny_seeing.picture(*LAG_SIZE, number))).decode()
        body = {"text": text, "image_data": file, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        paths.append(folder / str(number))
        paths[-1].write_bytes(json.dumps(body).encode())
    return paths


@contextmanager
def _other() -> Iterator[Executor]:
    """Yield an executor with one process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Use the thread switch interval of the server's process."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _post_all(url: str, files: Sequence[Path]) -> None:
    """Send all bodies at once. Raises RuntimeError if a request is refused."""
    with ThreadPoolExecutor(len(files)) as threads:
        list(threads.map(_post, repeat(url), files))


def _post(url: str, file: Path) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    try:
        connection.request("POST", "/generate", file.read_bytes(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {said[:500]!r}")
    finally:
        connection.close()
