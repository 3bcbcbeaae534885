"""`just study gpu-tables FOLDER`: add up measured kernels of other engines for `just study gpu-model`.

FOLDER is an unpacked wheel of NVIDIA's package aiconfigurator-core (Apache 2.0), which has tables of kernel times for
SGLang, vLLM and TensorRT-LLM. The sums are written to gpu_tables.json. Needs pyarrow, which Penstock does not install.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_model import MODELS, Model

VERSIONS = {"sglang": "0.5.14", "vllm": "0.24.0", "trtllm": "1.3.0rc20"}
GPUS = ("h100", "h200")
SUMS = Path(__file__).with_name("gpu_tables.json")
ROWS, CONTEXT, PROMPTS = (1, 16, 64, 256), 1024, (8, 1024)  # decode; rows and tokens of a prefill step
PARTS = ("products", "attention", "experts")
Row = Mapping[str, Any]
Table = Callable[[str, str], list[Row]]  # (operation, file) -> rows


def products(model: Model, tokens: int, sampled: int) -> dict[tuple[int, int, int], int]:
    """Return the products with 16-bit weights of a step: (rows, outputs, inputs) -> count.

    `sampled` is the number of rows for which logits are computed.
    """
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = {
        (tokens, width + 2 * kv_width, model.size): model.layers,
        (tokens, model.size, width): model.layers,
        (sampled, model.vocab, model.size): 1,
    }
    if model.experts:
        return found | {(tokens, model.experts, model.size): model.layers}
    return found | {
        (tokens, 2 * model.inner, model.size): model.layers,
        (tokens, model.size, model.inner): model.layers,
    }


class Gemms:
    """Times of products by (rows, outputs, inputs), in µs, with interpolation over outputs and inputs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._times = {
            (row["m"], row["n"], row["k"]): 1e3 * row["latency"] for row in rows if row["gemm_dtype"] == "bfloat16"
        }
        self._sizes = sorted({n for _, n, _ in self._times})

    def __call__(self, rows: int, out_size: int, in_size: int) -> float:
        """Return the time in µs. Raises KeyError if the table has no products with this number of rows."""
        (a, b), (c, d) = self._around(out_size), self._around(in_size)

        def along(k: int) -> float:
            return _line(out_size, a, self._times[rows, a, k], b, self._times[rows, b, k])

        return _line(in_size, c, along(c), d, along(d))

    def floor(self) -> float:
        """Return the shortest time of a product, in µs."""
        return min(self._times.values())

    def _around(self, size: int) -> tuple[int, int]:
        place = min(max(1, bisect_left(self._sizes, size)), len(self._sizes) - 1)
        if self._sizes[place] == size:
            return size, size
        return self._sizes[place - 1], self._sizes[place]


def _line(x: float, a: float, at_a: float, b: float, at_b: float) -> float:
    return at_a if a == b else at_a + (x - a) / (b - a) * (at_b - at_a)


def attention_time(rows: Sequence[Row], model: Model, batch: int, tokens: int, cache: str, *, decode: bool) -> float:
    """Return the time of all layers' attention, in µs. Raises KeyError if the table lacks it."""
    place = ("step", CONTEXT - 1) if decode else ("isl", tokens)

    def of_layer(window: int) -> float:
        times = [
            1e3 * row["latency"]
            for row in rows
            if (row["batch_size"], row[place[0]], row["num_heads"]) == (batch, place[1], model.heads)
            and row["num_key_value_heads"] % model.heads == model.kv_heads % model.heads
            and (row["head_dim"], row["kv_cache_dtype"], row["window_size"]) == (model.head_dim, cache, window)
            and row["attn_dtype"] == "bfloat16"
        ]
        if not times:
            raise KeyError(window)
        return min(times)

    windowed = model.layers // 2 if model.window else 0
    return windowed * (of_layer(model.window) if windowed else 0.0) + (model.layers - windowed) * of_layer(0)


def experts_time(rows: Sequence[Row], model: Model, tokens: int) -> float:
    """Return the time of all layers' experts, in µs. Raises KeyError if the table lacks it."""
    dtype = "bfloat16" if model.expert_bits == 16 else "w4a16_mxfp4"
    shape = (dtype, tokens, model.size, model.inner, model.top_k, model.experts, 1, 1, "balanced")
    names = ("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    times = [
        row["latency"] for row in rows if tuple(row[name] for name in (*names, "moe_ep_size", "distribution")) == shape
    ]
    if not times:
        raise KeyError(shape)
    return 1e3 * min(times) * model.layers


def sums(table: Table, gemms: Gemms) -> dict[str, dict[str, float]]:
    """Return {case: {part: µs}} for all models without latent attention. Cases that the tables lack are left out."""
    found: dict[str, dict[str, float]] = {}
    decode, prefill, experts = (
        table("attention", "generation_attention"),
        table("attention", "context_attention"),
        table("moe", "moe"),
    )
    for name, model in MODELS.items():
        if model.latent:
            continue
        for cache in ("bfloat16", "fp8"):
            for count in (*ROWS, 0):
                batch, tokens = (count, count) if count else (PROMPTS[0], PROMPTS[0] * PROMPTS[1])
                attended = decode if count else prefill
                try:
                    parts = {
                        "products": sum(
                            times * gemms(*shape) for shape, times in products(model, tokens, batch).items()
                        ),
                        "attention": attention_time(attended, model, batch, PROMPTS[1], cache, decode=bool(count)),
                        "experts": experts_time(experts, model, tokens) if model.experts else 0.0,
                    }
                except KeyError:
                    continue
                found[case_name(name, count, 16 if cache == "bfloat16" else 8)] = {
                    part: round(time, 1) for part, time in parts.items()
                }
    return found


def case_name(model: str, rows: int, cache_bits: float) -> str:
    """Return the key of a case. `rows` is 0 for a prefill step."""
    return f"{model}, {f'{rows} rows' if rows else 'prefill'}, {cache_bits:g}-bit cache"


def main(arguments: Sequence[str]) -> int:
    """Write the sums to gpu_tables.json."""
    parser = argparse.ArgumentParser(prog="just study gpu-tables", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder / "aiconfigurator_core/systems/data"
    import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]

    written: dict[str, Any] = {}
    for gpu in GPUS:
        written[gpu] = {}
        for engine, version in VERSIONS.items():

            def table(
                operation: str, file: str, gpu: str = gpu, engine: str = engine, version: str = version
            ) -> list[Row]:
                path = folder / f"{gpu}_sxm" / operation / engine / version / f"{file}_perf.parquet"
                return parquet.read_table(path).to_pylist()

            gemms = Gemms(table("gemm", "gemm"))
            written[gpu][engine] = sums(table, gemms)
            if engine == "sglang":
                written[gpu]["floor"] = round(gemms.floor(), 2)
    SUMS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0
