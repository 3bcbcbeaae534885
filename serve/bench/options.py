"""Command-line options common to several commands, and the workloads that these options describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from runtime.errors import ConfigurationError
from serve.bench import PROGRAM
from serve.bench.workload import (
    Prompt,
    RandomLengths,
    SharedPrefixes,
    Vocabulary,
    file_prompts,
    random_prompts,
    shared_prefix_prompts,
)

DEFAULT_NUM_PROMPTS = 1000
# Added to the seed for warm-up prompts, so that they differ from the measured prompts and do not cache their prefixes.
WARMUP_SEED = 10_007


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults in the help, except empty defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def new_parser(command: str, description: str, *, program: str = PROGRAM) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{program} {command}",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=("random", "shared-prefix", "file"), default="random")
    group.add_argument("--dataset-path", help="JSONL of the file dataset: prompt or messages, output_len")
    group.add_argument("--num-prompts", type=int, help=f"{DEFAULT_NUM_PROMPTS} with random, all lines of a file")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--random-input-len", type=int, default=1024, help="tokens")
    group.add_argument("--random-output-len", type=int, default=1024, help="tokens")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths are uniform in [length * ratio, length]",
    )
    group.add_argument("--prefix-groups", type=int, default=64, help="groups that share a system prompt")
    group.add_argument("--prompts-per-group", type=int, default=16)
    group.add_argument("--system-prompt-len", type=int, default=2048, help="tokens that a group shares")
    group.add_argument("--question-len", type=int, default=128, help="tokens that are specific to each prompt")
    group.add_argument("--output-len", type=int, default=256, help="tokens, with shared-prefix")
    group.add_argument("--file-output-len", type=int, help="output tokens of lines without output_len")
    group.add_argument(
        "--tokenizer",
        help="tokenizer.json or its directory: to count tokens and create texts (serving: default the server's)",
    )
    group.add_argument("--vocab-size", type=int, help="without a tokenizer: prompts consist of ids in [0, N)")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output-file", help="write the result as JSON")


def read_vocabulary(options: argparse.Namespace) -> Vocabulary | None:
    """Return the vocabulary that --tokenizer or --vocab-size sets, or None."""
    if options.tokenizer is not None:
        return Vocabulary.of_tokenizer(options.tokenizer)
    return Vocabulary.of_size(options.vocab_size) if options.vocab_size else None


def build_prompts(options: argparse.Namespace, vocabulary: Vocabulary | None, *, as_text: bool) -> Sequence[Prompt]:
    """Return the prompts to measure. Raises `ConfigurationError` for invalid options."""
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigurationError("--num-prompts must be at least 1.")
    if options.dataset_name == "file":
        if options.dataset_path is None:
            raise ConfigurationError("--dataset-name file requires --dataset-path.")
        return file_prompts(
            options.dataset_path,
            vocabulary,
            num_prompts=options.num_prompts,
            output_tokens=options.file_output_len,
        )
    known = _need(vocabulary, as_text=as_text)
    if options.dataset_name == "random":
        number = options.num_prompts or DEFAULT_NUM_PROMPTS
        return random_prompts(_lengths(options), number, options.seed, known, as_text=as_text)
    if options.num_prompts is not None:
        raise ConfigurationError(
            "--num-prompts does not apply to shared-prefix: set --prefix-groups and --prompts-per-group."
        )
    return shared_prefix_prompts(_prefixes(options), options.seed, known, as_text=as_text)


def build_warmup(
    options: argparse.Namespace,
    prompts: Sequence[Prompt],
    vocabulary: Vocabulary | None,
    number: int,
    *,
    as_text: bool,
) -> Sequence[Prompt]:
    """Return `number` warm-up prompts of the same dataset, which are not measured.

    They are drawn with another seed, or are the first prompts of the file if the dataset is a file.
    """
    if number < 1:
        return []
    if options.dataset_name == "file":
        return [prompts[i % len(prompts)] for i in range(number)]
    known, seed = _need(vocabulary, as_text=as_text), options.seed + WARMUP_SEED
    if options.dataset_name == "random":
        return random_prompts(_lengths(options), number, seed, known, as_text=as_text)
    one_each = replace(_prefixes(options), groups=number, prompts_per_group=1)
    return shared_prefix_prompts(one_each, seed, known, as_text=as_text)


def _need(vocabulary: Vocabulary | None, *, as_text: bool) -> Vocabulary:
    if vocabulary is None or (as_text and not vocabulary.has_text):
        raise ConfigurationError(
            "Prompts are built from tokens, and no server names its tokenizer: set --tokenizer (a tokenizer.json or "
            "its directory)" + ("; chat prompts must be texts." if as_text else ", or --vocab-size to send token ids.")
        )
    return vocabulary


def _lengths(options: argparse.Namespace) -> RandomLengths:
    return RandomLengths(
        input_tokens=options.random_input_len,
        output_tokens=options.random_output_len,
        range_ratio=options.random_range_ratio,
    )


def _prefixes(options: argparse.Namespace) -> SharedPrefixes:
    return SharedPrefixes(
        groups=options.prefix_groups,
        prompts_per_group=options.prompts_per_group,
        system_prompt_tokens=options.system_prompt_len,
        question_tokens=options.question_len,
        output_tokens=options.output_len,
    )
