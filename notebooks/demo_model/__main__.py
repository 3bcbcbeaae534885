"""Make the demo model: `just demo-model`, or a single stage with `just demo-model STAGE`.

Stages: corpus (documents and tokenizer), train (weights), export (the folder that is served), draft (its draft head),
evaluate (the table).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_model import draft_head, evaluation, export, vocabulary
from demo_model.conversation import render
from demo_model.corpus import SKILLS, Encoded, Mixture, documents, encode
from demo_model.evaluation import Server, Transformers
from demo_model.network import Shape
from demo_model.training import Schedule, Trainer
from serve.demo import WEIGHTS

SHARES = {  # each skill's fraction of the training tokens
    "arguments": 0.12,
    "arithmetic": 0.26,
    "tools": 0.16,
    "dialogue": 0.09,
    "extraction": 0.19,
    "tables": 0.04,
    "repeating": 0.065,
    "conversions": 0.025,
    "penstock": 0.03,
    "stories": 0.01,
    "refusal": 0.01,
}
COUNTS = {  # number of documents per skill, enough for one or a few passes
    "arguments": 120_000,
    "arithmetic": 110_000,
    "tools": 30_000,
    "dialogue": 40_000,
    "extraction": 70_000,
    "tables": 60_000,
    "repeating": 40_000,
    "conversions": 40_000,
    "penstock": 30_000,
    "stories": 20_000,
    "refusal": 20_000,
}
SEED = 1
LONGEST = 768
TOKENIZER_SAMPLE = 5000  # documents per skill to train the tokenizer
EVERY = 200  # number of steps between checkpoints


def make_corpus(options: argparse.Namespace) -> None:
    """Train the tokenizer on a sample, and write the documents of every skill as token arrays."""
    options.work.mkdir(parents=True, exist_ok=True)
    sample = (
        "".join(text for text, _ in render(document))
        for name in SKILLS
        for document in documents(name, SEED - 1, TOKENIZER_SAMPLE)
    )
    tokenizer = vocabulary.train(sample, Shape().vocab)
    tokenizer.save(str(options.work / "tokenizer.json"))
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    for name, count in COUNTS.items():
        encoded = encode(tokenizer, documents(name, SEED, max(100, int(count * options.scale))), LONGEST)
        np.savez(options.work / f"{name}.npz", tokens=encoded.tokens, learnt=encoded.learnt, starts=encoded.starts)
        size, learnt = len(encoded.tokens), encoded.learnt.mean()
        print(f"{name}: {len(encoded)} documents, {size / 1e6:.2f} M tokens, {learnt:.0%} learnt", flush=True)


def _corpus(work: Path) -> dict[str, Encoded]:
    loaded = {}
    for name in SKILLS:
        arrays = np.load(work / f"{name}.npz")
        loaded[name] = Encoded(arrays["tokens"], arrays["learnt"], arrays["starts"])
    return loaded


def _shares(text: str) -> dict[str, float]:
    """Return the mixture of skills. Shares on the command line replace the default shares."""
    named = {name: float(share) for name, _, share in (part.partition("=") for part in text.split(",") if part)}
    return SHARES | named


def train(options: argparse.Namespace) -> None:
    """Train from scratch, from the last checkpoint, or from another checkpoint's weights with a new schedule."""
    torch.manual_seed(options.seed)
    given = {field.name: getattr(options, field.name) for field in fields(Schedule)}
    schedule = replace(Schedule(), **{name: value for name, value in given.items() if value is not None})
    trainer = Trainer(Shape(layers=options.layers), schedule, options.device, options.compile)
    checkpoint = options.work / "checkpoint.pt"
    if options.further:
        trainer.restore(options.further, fresh_clock=True)
    elif options.resume:
        trainer.restore(checkpoint)
    size = sum(weight.numel() for weight in trainer.network.parameters())
    print(f"{size / 1e6:.2f} M parameters, {schedule}", flush=True)
    mixture = Mixture(_corpus(options.work), _shares(options.shares), options.seed + trainer.step)
    recent: list[float] = []
    began, first = time.monotonic(), trainer.step
    for loss in trainer.run(mixture):
        recent.append(loss)
        if trainer.step % 25 == 0:
            rate = (trainer.step - first) * schedule.tokens_per_step / (time.monotonic() - began)
            average = sum(recent) / len(recent)
            print(
                f"step {trainer.step} {trainer.progress:.1%} loss {average:.4f} {rate:.0f} tokens/s",
                flush=True,
            )
            recent.clear()
        if trainer.step % EVERY == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


def write(options: argparse.Namespace) -> None:
    """Export the last checkpoint."""
    tokenizer = Tokenizer.from_file(str(options.work / "tokenizer.json"))
    export.write(options.work / "checkpoint.pt", tokenizer, options.folder)


def evaluate(options: argparse.Namespace) -> None:
    """Print the table of the evaluation, and wrong answers if requested."""
    backend = Server(options.server) if options.server else Transformers(options.folder, options.device)
    print(evaluation.HEADER, flush=True)
    for exam in evaluation.EXAMS:
        if options.only in exam.name:
            score = evaluation.take(exam, backend, options.most)
            print(evaluation.line(score), flush=True)
            for question, answer in score.wrong[: options.show]:
                print(
                    f"  asked {question.asked.messages[-1].content!r}\n    want {question.expected!r}\n    "
                    f"got  {answer!r}"
                )


def train_draft_head(options: argparse.Namespace) -> None:
    """Train a draft head for the exported model, and write it to a subfolder of the model's folder."""
    torch.manual_seed(options.seed)
    target = draft_head.Target(options.folder, options.device)
    head = draft_head.Head(target.shape).to(options.device)
    given = {field.name: getattr(options, field.name) for field in fields(Schedule)}
    schedule = replace(draft_head.SCHEDULE, **{name: value for name, value in given.items() if value is not None})
    mixture = Mixture(_corpus(options.work), _shares(options.shares), options.seed)
    draft_head.train(head, target, mixture, schedule, options.device)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    draft_head.write(head, options.folder / "draft_head", tokenizer)


# the stages, in the order in which they run
STAGES = {"corpus": make_corpus, "train": train, "export": write, "draft": train_draft_head, "evaluate": evaluate}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="just demo-model", description=__doc__)
    top.add_argument("stage", nargs="?", choices=("all", *STAGES), default="all", help="all when left out")
    top.add_argument("--work", type=Path, default=Path("build/demo-model"), help="where corpus and checkpoints live")
    top.add_argument("--folder", type=Path, default=WEIGHTS, help="where the model is written")
    top.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--threads", type=int, default=0, help="CPU threads of training; 0: torch decides")
    top.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    top.add_argument("--seed", type=int, default=SEED)
    top.add_argument("--scale", type=float, default=1.0, help="factor of the number of documents")
    top.add_argument("--layers", type=int, default=Shape().layers)
    top.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    top.add_argument("--further", type=Path, help="start a new schedule from this checkpoint")
    top.add_argument("--shares", default="", help="changed shares of skills, such as tools=0.3,stories=0")
    top.add_argument("--server", help="evaluate a running server instead, such as http://127.0.0.1:30000")
    top.add_argument("--only", default="", help="exams whose name contains this")
    top.add_argument("--most", type=int, default=0, help="at most so many questions of each exam")
    top.add_argument("--show", type=int, default=0, help="wrong answers to show of each exam")
    for field in fields(Schedule):
        kind = int if field.type == "int" else float
        top.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=None)
    return top


def main() -> None:
    """Run the stage that the command line names."""
    options = parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in STAGES if options.stage == "all" else (options.stage,):
        STAGES[name](options)


if __name__ == "__main__":
    main()
