"""`just study gpu-model`: predict the time of decode steps on a GPU from bytes, operations, instructions and launches.

Nothing is measured. A kernel's time is the shortest time of any kernel in a CUDA graph, plus the longest of four times:

- its bytes, at a share of the memory's bandwidth
- the latency of its loads that need the result of another load
- the instructions of its main loop, at a share of the issue rate
- its operations, at a share of the peak

The kernels are those that Penstock launches (a test counts them). The roof is the time of the step's bytes and
operations at the full rates.

--compare predicts only the parts for which tables of other engines exist (`gpu_tables.py`): products with 16-bit
weights, attention and experts. Penstock computes these products with cuBLAS through torch, as SGLang and vLLM do, so
their predicted time is the mean of the times in these two tables. Attention and experts are our own kernels in Triton,
at the rates that the compiled code allows (`Gpu`). Prefill attention is FlashAttention 3, as in SGLang's table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """Published rates of a GPU, and assumptions on kernels."""

    bytes_per_s: float
    operations_per_s: float  # bfloat16, without sparsity; float8 has twice as many
    bandwidth_share: float = 0.9  # share of the bandwidth that a kernel with many bytes in flight reaches
    peak_share: float = 0.7  # share of the peak that a product of many rows reaches
    kernel_s: float = 2.2e-6  # shortest time of a kernel in a graph, with the gap before it
    latency_s: float = 0.8e-6  # of a load from memory
    issue_per_s: float = 2.97e13  # instructions of threads: 132 multiprocessors, 4 warps each at 1.755 GHz
    issue_share: float = 0.7


GPUS = {
    "a100": Gpu(2.04e12, 312e12),
    "h100": Gpu(3.35e12, 989e12),
    "h200": Gpu(4.8e12, 989e12),
    "b200": Gpu(8.0e12, 2250e12),
}


class Model(NamedTuple):
    """The shape of a decoder."""

    layers: int
    size: int
    inner: int  # of the MLP, or of one expert
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    shared: int = 0  # inner size of the shared expert
    latent: int = 0  # size of latent vectors (MLA), 512 + 64
    window: int = 0  # size of the sliding window of every second layer; 0: none
    expert_bits: float = 16  # most bits per weight of experts; fewer than 16 if checkpoints store them in fewer


MODELS = {
    "Llama-3.1-8B": Model(32, 4096, 14_336, 32, 8, 128, 128_256),
    "Qwen3-8B": Model(36, 4096, 12_288, 32, 8, 128, 151_936),
    "Qwen3-30B-A3B": Model(48, 2048, 768, 32, 4, 128, 151_936, experts=128, top_k=8),
    "gpt-oss-20b": Model(24, 2880, 2880, 64, 8, 64, 201_088, experts=32, top_k=4, window=128, expert_bits=4.25),
    "DeepSeek-V2-Lite": Model(27, 2048, 1408, 16, 1, 192, 102_400, experts=64, top_k=6, shared=2816, latent=576),
}
# Our kernels in two of the parts of a step that the tables of other engines have.
EXPERTS = ("sort", "experts' gate and up", "experts' gate", "experts' down", "combine")
ATTENTION = ("attention", "merge splits")
# Thread instructions in the main loops of compiled kernels: per e2m1 weight in tiles of up to 32 and of 128 rows
# (tests/ops/test_compiled.py), and per byte of the cache that decode attention reads. Per 64 keys and values of a head,
# these are 453 in 16 bits, 702 in float8.
FEW_ROWS, PER_WEIGHT = 32, (4.8, 7.2)
PER_CACHE_BYTE = {16: 453 * 128 / 2**15, 8: 702 * 128 / 2**14}
ENGINES = {"sglang": "SGLang", "vllm": "vLLM", "trtllm": "TensorRT-LLM"}
SUMS = Path(__file__).with_name("gpu_tables.json")


class Kernel(NamedTuple):
    """One launch: bytes that it reads and writes, operations, and properties that limit small kernels."""

    name: str
    bytes: float
    operations: float = 0.0
    instructions: float = 0.0  # thread instructions in the main loop; 0: never the limit
    loads: int = 1  # number of loads that wait for one another


def product(name: str, rows: float, out_size: int, in_size: int, bits: float = 16) -> Kernel:
    """Return a product of `rows` rows with a weight [O, I] that has this many bits per number."""
    moved = out_size * in_size * bits / 8 + 2 * rows * (in_size + out_size)
    return Kernel(name, moved, 2 * rows * out_size * in_size)


def small(name: str, rows: int, width: int) -> Kernel:
    """Return an operation that reads and writes rows of this width in 16 bits."""
    return Kernel(name, 4 * rows * width)


def layer(model: Model, rows: int, context: int, bits: float = 16, cache_bits: float = 16) -> Iterator[Kernel]:
    """Yield the launches of one layer. `bits` are those of linear layers and experts."""
    width = model.heads * model.head_dim
    yield small("residual norm", rows, model.size)
    yield from _attention(model, rows, context, bits, cache_bits)
    yield product("output product", rows, model.size, width if not model.latent else model.heads * 128, bits)
    yield small("norm", rows, model.size)
    if not model.experts:
        yield product("gate and up product", rows, 2 * model.inner, model.size, bits)
        yield small("gate", rows, 2 * model.inner)
        yield product("down product", rows, model.size, model.inner, bits)
        return
    pairs = rows * model.top_k
    used = min(model.experts, pairs)  # number of used experts, if tokens choose experts evenly
    yield product("router", rows, model.experts, model.size)
    yield small("route", rows, model.experts)
    yield small("sort", pairs, 2)
    for name, out_size, in_size in (
        ("experts' gate and up", 2 * model.inner, model.size),
        ("experts' down", model.size, model.inner),
    ):
        weights, width = used * out_size * in_size, min(bits, model.expert_bits)
        moved = weights * width / 8 + 2 * pairs * (in_size + out_size)
        tiles = max(1.0, pairs / used / 128)  # a weight is converted once for each 128 rows
        instructions = tiles * weights * PER_WEIGHT[pairs / used > FEW_ROWS] if width < 8 else 0.0
        yield Kernel(name, moved, 2 * pairs * out_size * in_size, instructions, loads=3)
        if out_size == 2 * model.inner:
            yield small("experts' gate", pairs, 2 * model.inner)
    yield small("combine", pairs, model.size)
    if model.shared:
        yield product("shared gate and up", rows, 2 * model.shared, model.size, bits)
        yield small("gate", rows, 2 * model.shared)
        yield product("shared down", rows, model.size, model.shared, bits)
        yield small("add", rows, model.size)


def _attention(model: Model, rows: int, context: int, bits: float, cache_bits: float) -> Iterator[Kernel]:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.latent:
        yield product("query product", rows, width, model.size, bits)
        yield product("latent product", rows, model.latent, model.size, bits)
        yield small("latent norm", rows, 512)
        yield small("rotate", rows, 64 * (model.heads + 1))
        yield product("keys per head", rows, model.heads * 512, 128)
        yield small("join", rows, model.heads * model.latent)
        yield small("store", rows, model.latent)
        read, operations = context * model.latent, 2 * context * model.heads * (model.latent + 512)
    else:
        yield product("query, key and value product", rows, width + 2 * kv_width, model.size, bits)
        yield small("norms of heads, rotation and store", rows, width + 2 * kv_width)
        read, operations = 2 * context * kv_width, 4 * context * width
    # The start of the row, its page and its keys are loaded one after the other.
    moved = rows * read * cache_bits / 8
    yield Kernel("attention", moved, rows * operations, moved * PER_CACHE_BYTE[int(cache_bits)], loads=3)
    yield small("merge splits", rows, width)._replace(loads=2)
    if model.latent:
        yield product("values per head", rows, model.heads * 128, 512)


def step(model: Model, rows: int, context: int, bits: float = 16, cache_bits: float = 16) -> list[Kernel]:
    """Return the launches of a decode step, in which each row attends to `context` tokens, with sampling."""
    kernels = [small("embed", rows, model.size)]
    for _ in range(model.layers):
        kernels += layer(model, rows, context, bits, cache_bits)
    kernels += [small("norm", rows, model.size), product("LM head", rows, model.vocab, model.size)]
    kernels += [small("logits", rows, model.vocab)]
    kernels += [Kernel(f"sample {number}", 4 * rows * model.vocab * (number < 3)) for number in range(4)]
    return kernels


class Prediction(NamedTuple):
    """The predicted time of a step, in seconds, its roof, and the number of launches."""

    seconds: float
    roof_s: float
    launches: int


def predict(gpu: Gpu, kernels: Sequence[Kernel], bits: float = 16) -> Prediction:
    """Add up the kernels' times. float8 products have twice the peak."""
    peak = gpu.operations_per_s * (2 if bits == 8 else 1)
    seconds = sum(
        gpu.kernel_s
        + max(
            kernel.bytes / (gpu.bytes_per_s * gpu.bandwidth_share),
            (kernel.loads - 1) * gpu.latency_s,
            kernel.instructions / (gpu.issue_per_s * gpu.issue_share),
            kernel.operations / (peak * gpu.peak_share),
        )
        for kernel in kernels
    )
    moved, operations = (sum(each) for each in zip(*((kernel.bytes, kernel.operations) for kernel in kernels)))
    return Prediction(seconds, max(moved / gpu.bytes_per_s, operations / peak), len(kernels))


def sums(gpu: str) -> Mapping[str, Any]:
    """Return {engine: {case: {part: µs}}} of the tables for a GPU (`gpu_tables.case_name`), or {} if there are none."""
    return json.loads(SUMS.read_text(encoding="utf-8")).get(gpu, {})


def windowed(model: Model, rows: int, context: int, cache_bits: float) -> list[Kernel]:
    """Return the launches of all layers' attention in a decode step."""
    found = []
    for index in range(model.layers):
        length = min(context, model.window) if model.window and index % 2 else context
        found += [each for each in _attention(model, rows, length, 16, cache_bits) if each.name in ATTENTION]
    return found


def compared(gpu: str, name: str, rows: int, cache_bits: float) -> dict[str, dict[str, float]]:
    """Return {engine: {part: ms}} for a case; the model predicts "ours". `rows` is 0 for a prefill step."""
    from bench.gpu_tables import CONTEXT, PROMPTS, case_name

    model, known = MODELS[name], sums(gpu)
    case = case_name(name, rows, cache_bits)
    found = {
        engine: {part: time / 1e3 for part, time in known[engine][case].items()}
        for engine in ENGINES
        if case in known[engine]
    }
    with_torch = [known[engine].get(case_name(name, rows, 16)) for engine in ("sglang", "vllm")]
    if None in with_torch:
        return {}
    products = sum(each["products"] for each in with_torch) / 2e3
    ours = {"products": products, "attention": with_torch[0]["attention"] / 1e3, "experts": 0.0}
    tokens = rows or PROMPTS[0] * PROMPTS[1]
    if rows:
        ours["attention"] = 1e3 * predict(GPUS[gpu], windowed(model, rows, CONTEXT, cache_bits)).seconds
    if model.experts:
        experts = [each for each in layer(model, tokens, CONTEXT) if each.name in EXPERTS]
        ours["experts"] = 1e3 * model.layers * predict(GPUS[gpu], experts).seconds
    return {"ours": ours, **found}


def comparison(gpu: str, rows: Sequence[int], cache_bits: float) -> Iterator[str]:
    """Yield a table in Markdown. Times are sums of products, attention and experts, in ms."""
    from bench.gpu_tables import CONTEXT, PROMPTS

    prefill = f"prefill of {PROMPTS[0]} x {PROMPTS[1]} tokens"
    yield f"{gpu}, {CONTEXT} tokens of context per row, {cache_bits:g}-bit cache; {prefill}."
    yield "Ours by the model, nothing measured; others by NVIDIA's tables of measured kernels."
    yield ""
    yield f"| model | step | ours | {' | '.join(ENGINES.values())} | best / ours | largest difference from the best |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in MODELS:
        for count in (*rows, 0):
            found = compared(gpu, name, count, cache_bits)
            others = {engine: sum(found[engine].values()) for engine in ENGINES if engine in found}
            if not others:
                continue
            ours, best = sum(found["ours"].values()), min(others, key=others.__getitem__)
            part = max(found["ours"], key=lambda each: abs(found["ours"][each] - found[best][each]))
            cells = [f"{others[engine]:.2f}" if engine in others else "" for engine in ENGINES]
            step = f"{count} rows" if count else "prefill"
            differs = f"{part}: {found['ours'][part]:.2f}, {ENGINES[best]} {found[best][part]:.2f}"
            yield f"| {name} | {step} | {ours:.2f} | {' | '.join(cells)} | {others[best] / ours:.2f} | {differs} |"


def lines(gpu: str, rows: Sequence[int], context: int, bits: float, cache_bits: float) -> Iterator[str]:
    """Yield a table in Markdown."""
    yield f"Predicted for {gpu}, {context} tokens of context per row, {bits:g} bits per weight; nothing is measured."
    yield ""
    yield "| model | rows | step, ms | roof, ms | share of the roof | launches | largest part |"
    yield "|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        for count in rows:
            kernels = step(model, count, context, bits, cache_bits)
            made = predict(GPUS[gpu], kernels, bits)
            parts: dict[str, float] = {}
            for kernel in kernels:
                parts[kernel.name] = parts.get(kernel.name, 0.0) + predict(GPUS[gpu], [kernel], bits).seconds
            part = max(parts, key=parts.__getitem__)
            yield (
                f"| {name} | {count} | {1e3 * made.seconds:.2f} | {1e3 * made.roof_s:.2f} | "
                f"{made.roof_s / made.seconds:.0%} | {made.launches} | {part} ({parts[part] / made.seconds:.0%}) |"
            )


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="just study gpu-model", description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--weight-bits", type=float, choices=(16, 8, 4.5), default=16, help="of layers and experts")
    parser.add_argument("--cache-bits", type=float, choices=(16, 8), default=16)
    parser.add_argument("--compare", action="store_true", help="with the tables of other engines")
    args = parser.parse_args(arguments)
    if args.compare:
        if args.gpu not in json.loads(SUMS.read_text(encoding="utf-8")):
            parser.error(f"--compare has no tables for {args.gpu}.")
        print("\n".join(comparison(args.gpu, args.rows, args.cache_bits)))
        return 0
    print("\n".join(lines(args.gpu, args.rows, args.context_len, args.weight_bits, args.cache_bits)))
    return 0
