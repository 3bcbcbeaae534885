"""`adapters`: the cost of LoRA adapters: tokens per second with none, one and many in a batch, in turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench import PROGRAM
from bench.checkpoints import SHAPES, Shape, write_checkpoint
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.bench import report
from serve.bench.options import new_parser

NUM_PROMPT = 16  # tokens of each prompt while decoding is timed


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = new_parser("adapters", "Time batches with LoRA adapters and without, in turns.", program=PROGRAM)
    options.add_argument("--shape", choices=[*SHAPES], default="S", help="shape of the model")
    options.add_argument("--dtype", default="bfloat16", help="dtype of the weights")
    options.add_argument("--rows", type=int, default=64, help="rows of each batch")
    options.add_argument("--rank", type=int, default=16, help="rank of each adapter")
    options.add_argument("--adapters", type=int, nargs="+", default=[1, 16, 64], help="adapters in a batch")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each row")
    options.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose time is taken")
    options.add_argument("--rounds", type=int, default=5, help="rounds, in each of which every case is timed once")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the study, print a table, and return the exit status."""
    args = parser().parse_args(argv)
    with TemporaryDirectory(prefix="penstock-adapters-") as folder:
        asyncio.run(_study(args, Path(folder)))
    return 0


async def _study(args: argparse.Namespace, folder: Path) -> None:
    shape = SHAPES[args.shape]
    model = folder / "model"
    write_checkpoint(shape, model, args.dtype)
    most = max(args.adapters)
    paths = [f"{number}={_write_adapter(folder / str(number), shape, args.rank)}" for number in range(most)]
    options = {"dtype": args.dtype, "disable_radix_cache": True, "random_seed": 1, "log_level": "error"}
    plain = Engine(str(model), skip_tokenizer_init=True, max_running_requests=args.rows, **options)
    adapted = Engine(
        str(model),
        skip_tokenizer_init=True,
        max_running_requests=args.rows,
        lora_paths=paths,
        max_loras_per_batch=most,
        **options,
    )
    async with plain, adapted:
        cases = {"plain engine": (plain, 0), **{f"{n} adapters": (adapted, n) for n in (0, *args.adapters)}}
        rates: dict[str, list[float]] = {name: [] for name in cases}
        prompts: dict[str, list[float]] = {name: [] for name in cases}
        for round_number in range(args.rounds + 1):
            for name, (engine, count) in cases.items():
                decoded = await _seconds(engine, count, args.rows, NUM_PROMPT, args.tokens)
                computed = await _seconds(engine, count, 1, args.prompt, 1)
                if round_number:  # the first round warms up
                    rates[name].append(args.rows * args.tokens / decoded)
                    prompts[name].append(computed * 1000)
    plain_rate, plain_ms = median(rates["plain engine"]), median(prompts["plain engine"])
    rows: list[tuple[str, str]] = []
    for name in cases:
        rate, ms = median(rates[name]), median(prompts[name])
        rows.append((name, f"{rate:,.0f} tokens/s ({rate / plain_rate:.2f}), prompt {ms:.1f} ms ({plain_ms / ms:.2f})"))
    title = f"{args.shape}, {args.dtype}, {args.rows} rows, rank {args.rank}, prompt of {args.prompt}"
    report.say(report.table(title, rows))


async def _seconds(engine: Engine, num_adapters: int, rows: int, prompt: int, new: int) -> float:
    """Return the seconds that `rows` equal requests take. Adapters are assigned in turn."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)

    async def one(row: int) -> None:
        lora = str(row % num_adapters) if num_adapters else None
        request = Request(ids=tuple(range(5, 5 + prompt)), sampling=sampling, lora=lora)
        async for _ in engine.core.submit(request).chunks():
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*(one(row) for row in range(rows)))
    return time.perf_counter() - began_s


def _write_adapter(folder: Path, shape: Shape, rank: int) -> Path:
    """Write a random adapter of all linear layers of a Llama-like model."""
    import torch
    from safetensors.torch import save_file

    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {  # inputs and outputs
        "self_attn.q_proj": (shape.hidden, heads),
        "self_attn.k_proj": (shape.hidden, kv_heads),
        "self_attn.v_proj": (shape.hidden, kv_heads),
        "self_attn.o_proj": (heads, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.mlp),
        "mlp.up_proj": (shape.hidden, shape.mlp),
        "mlp.down_proj": (shape.mlp, shape.hidden),
    }
    tensors = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
