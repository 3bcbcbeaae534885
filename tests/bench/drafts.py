"""`drafts`: compare speculative decoding with plain decoding: the tokens of many models, and the speed.

By default, every method of every family is compared in every way (`draft_matrix`). `--demo N` compares the tokens of N
prompts of the demo model. `--speed` measures ratios to plain decoding, with both engines in turns: the fastest turn of
each group of requests counts, so that other work of the machine matters little. The study fails if a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench import PROGRAM
from serve import Engine
from serve.bench.options import new_parser
from serve.demo import demo_path

FAMILIES = (
    "llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma2", "gemma3", "qwen3_next", "glm4_moe",
    "granitemoehybrid", "mixtral", "cohere2", "lfm2", "phi3", "falcon", "bloom", "olmo2", "llama4", "minicpm3",
    "stablelm", "exaone4", "qwen3_5",
)  # fmt: skip
ALWAYS: dict[str, Any] = {"speculative_adaptive": {"enabled": False}}
TREE: dict[str, Any] = {"speculative_eagle_topk": 3}
DEMO_METHODS: dict[str, dict[str, Any]] = {
    "NGRAM": {},
    "NGRAM tree": {"speculative_ngram_max_bfs_breadth": 3},
    "STANDALONE": {},
    "STANDALONE tree": TREE,
    "EAGLE3": {},
    "EAGLE3 tree": TREE,
    "NGRAM,STANDALONE": {},
    "NGRAM,EAGLE3": {},
}
DEMO_SKILLS = ("penstock", "stories", "repeating", "extraction", "dialogue", "tables", "arithmetic", "tools")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = new_parser("drafts", "Compare drafts with plain decoding: tokens and speed.", program=PROGRAM)
    options.add_argument("--families", nargs="*", help="of the matrix; default: all, or none with another option")
    options.add_argument("--methods", nargs="*", default=[], help="of the matrix, such as EAGLE3; default: all")
    options.add_argument("--tp-size", type=int, default=1, help="ranks of the matrix's engines")
    options.add_argument("--results", type=Path, help="file to which the results of the matrix are appended")
    options.add_argument("--page", type=Path, help="only print docs/speculation-families.md from such a file")
    options.add_argument("--demo", type=int, default=0, help="prompts of the demo model")
    options.add_argument("--speed", action="store_true", help="measure ratios to plain decoding")
    options.add_argument("--requests", type=int, default=16, help="requests of each measurement")
    options.add_argument("--repetitions", type=int, default=3, help="turns of each group of requests")
    options.add_argument("--shape", help="also measure a small draft that is right 3 of 4 times, on this shape")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the study. Return 1 if a token differs."""
    args = parser().parse_args(argv)
    if args.page is not None:
        from bench.draft_results import page

        print(page(args.page), end="")
        return 0
    families = args.families
    if families is None:
        families = [] if args.demo or args.speed or args.shape else FAMILIES
    wrong = _matrix(families, args.methods, args.tp_size, args.results) if families else 0
    with TemporaryDirectory(prefix="penstock-drafts-") as folder:
        if args.demo:
            wrong += asyncio.run(_demo(args.demo, Path(folder)))
        if args.speed:
            asyncio.run(_speed(args))
        if args.shape:
            asyncio.run(_forced(args, Path(folder)))
    return int(wrong > 0)


# --- tokens ---


def _matrix(families: Sequence[str], wanted: Sequence[str], tp_size: int, results: Path | None) -> int:
    """Print a line for each family and method. Return the number of different outputs."""
    import draft_matrix
    from bench.draft_results import append

    total, ranks = 0, {"tp_size": tp_size} if tp_size > 1 else {}
    for family in families:
        for method in draft_matrix.methods(family):
            if wanted and method not in wanted:
                continue
            found = draft_matrix.compare(family, method, **ranks)
            if results is not None:
                append(results, family, method, tp_size, found)
            if found is None:
                print(f"{family:18}{method:18}takes one chain only", flush=True)
                continue
            total += len(found.different)
            graph = "" if found.in_graph else ", no CPU graph"
            print(
                f"{family:18}{method:18}{len(found.different)} different, {found.accepted} drafts accepted, "
                f"{found.retracted} retractions{graph} {'; '.join(found.different)}",
                flush=True,
            )
    return total


async def _demo(count: int, folder: Path) -> int:
    """Compare the tokens of `count` prompts of the demo model. Return the number of different outputs."""
    prompts = [text for skill in DEMO_SKILLS for text in held_prompts(skill, -(-count // len(DEMO_SKILLS)))][:count]
    expected, _ = await _outputs(prompts)
    total = 0
    small = write_small_demo(folder)
    for method, more in DEMO_METHODS.items():
        name = method.removesuffix(" tree")
        path = {"speculative_draft_model_path": small} if "STANDALONE" in name else {}
        found, accepted = await _outputs(prompts, speculative_algorithm=name, **ALWAYS, **path, **more)
        different = sum(one != other for one, other in zip(expected, found, strict=True))
        total += different
        tokens = sum(map(len, found))
        print(
            f"{method:18}{count} prompts: {different} different; {accepted} of {tokens} tokens were drafts", flush=True
        )
    return total


async def _outputs(prompts: Sequence[str], **options: Any) -> tuple[list[list[int]], int]:
    """Return the ids after each prompt, and the number of accepted drafts. Every fourth request is drawn."""
    greedy, drawn = {"temperature": 0}, {"temperature": 0.8, "sampling_seed": 5}
    found, accepted = [], 0
    async with Engine(log_level="error", random_seed=1, **options) as engine:
        for first in range(0, len(prompts), 8):
            params = [{**(greedy if i % 4 else drawn), "max_new_tokens": 32} for i in range(first, first + 8)]
            group = prompts[first : first + 8]
            calls = (engine.generate(text, sampling_params=own) for text, own in zip(group, params, strict=False))
            for answer in await asyncio.gather(*calls):
                found.append(answer["output_ids"])
                accepted += answer["meta_info"].get("spec_num_correct_drafts", 0)
    return found, accepted


def held_prompts(skill: str, count: int) -> list[str]:
    """Return texts of a skill of the demo model that it was not trained on, up to its answer."""
    from demo_model.conversation import Prose, render
    from demo_model.corpus import documents

    found = []
    for document in documents(skill, 1, count, "held"):
        pieces = list(render(document))
        text = "".join(text for text, _ in pieces)
        if isinstance(document, Prose):
            found.append(text[: max(len(text) // 3, 1)])
            continue
        last = max(number for number, (_, is_learned) in enumerate(pieces) if is_learned)
        while last and pieces[last - 1][1]:
            last -= 1
        found.append("".join(text for text, _ in pieces[:last]))
    return found


def write_small_demo(folder: Path) -> str:
    """Write the demo model without its last layer, and return its path."""
    from safetensors.torch import load_file, save_file

    source, target = Path(demo_path() or ""), folder / "small"
    target.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] -= 1
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    last = f"model.layers.{config['num_hidden_layers']}."
    tensors = load_file(source / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if not name.startswith(last)}, target / "model.safetensors")
    return str(target)


# --- speed ---


async def _speed(args: argparse.Namespace) -> None:
    """Print the ratio of the tokens per second with drafts to those without, for each kind of text."""
    cases: list[tuple[str, str, str, int, dict[str, Any]]] = [
        ("edits", "repeating", "NGRAM", 1, {}),
        ("extraction", "extraction", "NGRAM", 1, {}),
        ("held-out chat", "penstock", "EAGLE3", 1, {}),
        ("held-out chat", "penstock", "EAGLE3", 1, ALWAYS),
        *(("prose", "stories", method, rows, {}) for method in ("NGRAM", "EAGLE3") for rows in (1, 4, 16, 64)),
    ]
    for name, skill, method, rows, more in cases:
        prompts = held_prompts(skill, max(args.requests, rows))
        drafted = {"speculative_algorithm": method, **more}
        ratio, length = await _ratio({}, drafted, prompts, rows, args.repetitions, 96)
        kind = f"{name}, {method}{'' if more else ', adaptive'}, {rows} at once"
        print(f"{kind}: {ratio:.2f} times plain, {length:.2f} tokens per check", flush=True)


async def _ratio(
    plain: Mapping[str, Any],
    drafted: Mapping[str, Any],
    prompts: Sequence[Any],
    rows: int,
    repetitions: int,
    new: int,
) -> tuple[float, float]:
    """Return the ratio of times (plain to drafted), and the mean number of tokens of a step that verified drafts.

    `rows` requests run at a time. A first turn is not measured. Raises RuntimeError if tokens differ.
    """
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": isinstance(prompts[0], list)}
    groups = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
    best = [[float("inf")] * len(groups) for _ in range(2)]
    lengths: list[float] = []
    async with AsyncExitStack() as stack:
        common = {"log_level": "error", "random_seed": 1, "disable_radix_cache": True}
        engines = [await stack.enter_async_context(Engine(**common, **options)) for options in (plain, drafted)]
        for turn in range(repetitions + 1):
            for number, group in enumerate(groups):
                ids = []
                for own, engine in zip(best, engines, strict=True):
                    begin = perf_counter()
                    calls = (engine.generate(**_prompt(each), sampling_params=params) for each in group)
                    answers = await asyncio.gather(*calls)
                    own[number] = min(own[number], perf_counter() - begin) if turn else own[number]
                    ids.append([answer["output_ids"] for answer in answers])
                    lengths += [answer["meta_info"].get("spec_accept_length", 0.0) for answer in answers]
                if ids[0] != ids[1]:
                    raise RuntimeError(f"The tokens of group {number} differ.")
    checked = [length for length in lengths if length]
    return sum(best[0]) / sum(best[1]), sum(checked) / len(checked) if checked else 1.0


def _prompt(each: str | list[int]) -> dict[str, Any]:
    return {"prompt": each} if isinstance(each, str) else {"input_ids": each}


async def _forced(args: argparse.Namespace, folder: Path) -> None:
    """Print the ratio for a random model of this shape with a small draft model, of whose drafts 3 of 4 are right."""
    from dataclasses import replace

    from bench.checkpoints import SHAPES, write_checkpoint
    from draft_matrix import known_drafts

    shape = SHAPES[args.shape]
    small = replace(shape, hidden=shape.hidden // 4, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=shape.hidden)
    paths = [folder / "large", folder / "small-draft"]
    for own, path in zip((shape, small), paths, strict=True):
        write_checkpoint(own, path)
    plain: dict[str, Any] = {"model_path": str(paths[0]), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    plain |= {"context_length": 2048, "max_total_tokens": 4096}
    drafted = {**plain, "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(paths[1])}
    prompts = [[5 + (31 * number + 7 * place) % 30_000 for place in range(64)] for number in range(2)]
    params = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    async with Engine(log_level="error", **plain) as engine:
        known = {
            tuple(ids): (await engine.generate(input_ids=ids, sampling_params=params))["output_ids"] for ids in prompts
        }
    with known_drafts(known):
        ratio, length = await _ratio(plain, drafted, prompts, 1, args.repetitions, 96)
    print(f"shape {args.shape}, 3 of 4 drafts right: {ratio:.2f} times plain, {length:.2f} tokens per check")
