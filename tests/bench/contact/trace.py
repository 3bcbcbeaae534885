"""Profile decode steps of an engine: write a trace for viewers, and list the kernels that take most of the time."""

from __future__ import annotations

import argparse
import gzip
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from bench.gpu.bench import FULL, MODELS, SMALL, Bench, warm_up
from bench.gpu.figure import Figure, document_of, line_of
from bench.gpu.limits import Limits
from runtime.errors import EngineFailure
from runtime.profile import ProfileOptions
from serve.bench import report
from serve.bench.offline import throughput
from serve.bench.workload import RandomLengths, random_prompts
from serve.python.engine import Engine

ROWS, STEPS = 8, 24
OUTPUT = 48  # tokens of each request, so that most steps only decode
MOST = 20  # number of listed kernels
NAME_CHARS = 80
FILE = "decode.trace.json.gz"
NO_LIMITS = Limits(1.0, 1.0, 1.0, "bfloat16")  # a trace is not compared with the device's limits


def main(argv: Sequence[str]) -> int:
    """Write the trace into the folder. Raises `EngineFailure` if a GPU's steps replayed no graph."""
    parser = argparse.ArgumentParser(prog="bench.contact.trace")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", required=True, help="where the trace is written")
    parser.add_argument("--output-file")
    options = parser.parse_args(argv)
    model = MODELS["tiny" if options.small else "qwen3-0.6b"]
    path = Path(options.folder) / FILE
    path.unlink(missing_ok=True)
    with TemporaryDirectory() as scratch:
        sizes = SMALL if options.small else FULL
        bench = Bench(device=options.device, folder=Path(scratch), limits=NO_LIMITS, sizes=sizes)

        async def work(engine: Engine) -> None:
            await warm_up(engine, model, ROWS)
            lengths = RandomLengths(input_tokens=32, output_tokens=OUTPUT, range_ratio=1.0)
            prompts = random_prompts(lengths, ROWS, 1, model.vocabulary, as_text=False)
            await engine.core.start_profile(ProfileOptions(path=path, num_steps=STEPS))
            await throughput(engine, prompts)
            await engine.core.stop_profile()

        bench.run(model, work, max_running_requests=ROWS, skip_tokenizer_init=True)
    events = orjson.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    rows = kernel_rows(events, model.name, on_gpu=options.device != "cpu")
    report.say(f"A trace of {STEPS} steps was written to {path}.")
    for row in rows:
        report.say(line_of(row))
    if options.output_file:
        report.write(options.output_file, report.document("trace", vars(options), {"rows": document_of(rows)}))
    return 0


def kernel_rows(events: Sequence[Mapping[str, Any]], model: str, *, on_gpu: bool) -> list[Figure]:
    """Return the time of the kernels, or of torch's operations on a CPU, that take the most time.

    Raises `EngineFailure` if the trace has none of them, or no replay of a graph on a GPU.
    """
    category = "kernel" if on_gpu else "cpu_op"
    times, calls = Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") == category:
            times[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    replays = sum(event.get("name") == "cudaGraphLaunch" for event in events)
    if not times or (on_gpu and not replays):
        raise EngineFailure(f"The trace has {len(times)} kernels and {replays} replays of graphs.")
    total = sum(times.values())
    rows = [Figure(f"{STEPS} profiled steps, {replays} replays of graphs: all kernels", model, total, "us")]
    for name, taken in times.most_common(MOST):
        short = name[:NAME_CHARS].replace("|", "/")
        rows.append(Figure(f"of them {calls[name]} x {short}", model, taken, "us"))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
