"""`just study gpu-model`: predict the time of decode steps on a GPU from bytes, operations and launches.

Nothing is measured. A kernel takes the longest of three times: its bytes at a share of the memory's bandwidth, its
operations at a share of the peak, and a shortest time for any kernel in a CUDA graph. The kernels are those that
Penstock launches (a test counts them). The roof is the time of the step's bytes and operations at the full rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Gpu(NamedTuple):
    """Published rates of a GPU, and assumptions on kernels."""

    bytes_per_s: float
    operations_per_s: float  # bfloat16, without sparsity; float8 has twice as many
    bandwidth_share: float = 0.9  # share of the bandwidth that a kernel with many bytes in flight reaches
    peak_share: float = 0.7  # share of the peak that a product of many rows reaches
    kernel_s: float = 2.2e-6  # shortest time of a kernel in a graph, with the gap before it


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
    expert_bits: float = 16  # most bits per weight of experts; fewer than 16 if checkpoints store them in fewer


MODELS = {
    "Llama-3.1-8B": Model(32, 4096, 14_336, 32, 8, 128, 128_256),
    "Qwen3-8B": Model(36, 4096, 12_288, 32, 8, 128, 151_936),
    "Qwen3-30B-A3B": Model(48, 2048, 768, 32, 4, 128, 151_936, experts=128, top_k=8),
    "gpt-oss-20b": Model(24, 2880, 2880, 64, 8, 64, 201_088, experts=32, top_k=4, expert_bits=4.25),
    "DeepSeek-V2-Lite": Model(27, 2048, 1408, 16, 1, 192, 102_400, experts=64, top_k=6, shared=2816, latent=576),
}
# Sums of measured kernels from NVIDIA's published tables (aiconfigurator-core 0.12.0, for SGLang, vLLM and
# TensorRT-LLM), in ms: (model, rows, context) -> (least, most). They fit the bandwidth of an H200.
TABLES = {("Llama-3.1-8B", 1, 1024): (4.54, 4.54), ("Qwen3-8B", 256, 1536): (20.1, 21.6)}


class Kernel(NamedTuple):
    """One launch: bytes that it reads and writes, and operations."""

    name: str
    bytes: float
    operations: float = 0.0


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
    # Expected number of experts that at least one token uses, if tokens choose at random.
    used = model.experts * (1 - (1 - model.top_k / model.experts) ** rows)
    yield product("router", rows, model.experts, model.size)
    yield small("route", rows, model.experts)
    yield small("sort", pairs, 2)
    for name, out_size, in_size in (
        ("experts' gate and up", 2 * model.inner, model.size),
        ("experts' down", model.size, model.inner),
    ):
        moved = used * out_size * in_size * min(bits, model.expert_bits) / 8 + 2 * pairs * (in_size + out_size)
        yield Kernel(name, moved, 2 * pairs * out_size * in_size)
        if out_size == 2 * model.inner:
            yield small("gate", pairs, 2 * model.inner)
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
    yield Kernel("attention", rows * read * cache_bits / 8, rows * operations)
    yield small("merge splits", rows, width)
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
        max(
            gpu.kernel_s + kernel.bytes / (gpu.bytes_per_s * gpu.bandwidth_share),
            kernel.operations / (peak * gpu.peak_share),
        )
        for kernel in kernels
    )
    moved, operations = (sum(each) for each in zip(*((kernel.bytes, kernel.operations) for kernel in kernels)))
    return Prediction(seconds, max(moved / gpu.bytes_per_s, operations / peak), len(kernels))


def lines(gpu: str, rows: Sequence[int], context: int, bits: float, cache_bits: float) -> Iterator[str]:
    """Yield a table in Markdown."""
    yield f"Predicted for {gpu}, {context} tokens of context per row, {bits:g} bits per weight; nothing is measured."
    yield ""
    yield "| model | rows | step, ms | roof, ms | share of the roof | launches | largest part | sums of tables, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        for count in rows:
            kernels = step(model, count, context, bits, cache_bits)
            made = predict(GPUS[gpu], kernels, bits)
            parts: dict[str, float] = {}
            for kernel in kernels:
                parts[kernel.name] = parts.get(kernel.name, 0.0) + predict(GPUS[gpu], [kernel], bits).seconds
            part = max(parts, key=parts.__getitem__)
            known = TABLES.get((name, count, context)) if gpu == "h200" and bits == cache_bits == 16 else None
            told = "" if known is None else " to ".join(dict.fromkeys(f"{each:g}" for each in known))
            yield (
                f"| {name} | {count} | {1e3 * made.seconds:.2f} | {1e3 * made.roof_s:.2f} | "
                f"{made.roof_s / made.seconds:.0%} | {made.launches} | {part} ({parts[part] / made.seconds:.0%}) | "
                f"{told} |"
            )


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="just study gpu-model", description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--weight-bits", type=float, choices=(16, 8, 4.5), default=16, help="of layers and experts")
    parser.add_argument("--cache-bits", type=float, choices=(16, 8), default=16)
    args = parser.parse_args(arguments)
    print("\n".join(lines(args.gpu, args.rows, args.context_len, args.weight_bits, args.cache_bits)))
    return 0
