"""Workloads: prompts with their output lengths, and arrival times. Equal seeds give equal workloads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_FITS = 12  # maximum number of attempts to find a text with the right number of tokens


class Vocabulary:
    """The ordinary (not special) token ids of a model. With a tokenizer, also converts between ids and text."""

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> None:
        if not len(ids):
            raise ConfigurationError("The vocabulary has no ordinary tokens.")
        self.ids = np.asarray(ids, dtype=np.int64)
        self._tokenizer = tokenizer

    @classmethod
    def of_size(cls, size: int) -> Vocabulary:
        """Return a vocabulary of the ids 0 to `size` - 1, without text, for servers that accept token ids."""
        return cls(range(size))

    @classmethod
    def of_tokenizer(cls, path: str) -> Vocabulary:
        """Read `tokenizer.json` from its path or from its folder. Raises `ConfigurationError` if it does not exist."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigurationError(f"There is no tokenizer at {file}.")
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        return cls(sorted(set(tokenizer.get_vocab().values()) - special), tokenizer)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def run(self, start: int, length: int) -> list[int]:
        """Return `length` consecutive ordinary ids, beginning at index `start`. Index 0 follows the last index."""
        return self.ids[(start + np.arange(length)) % len(self.ids)].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._need_tokenizer().decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self._need_tokenizer().encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def text_of(self, ids: Sequence[int]) -> str:
        """Return a text with as many, or nearly as many, tokens as `ids`. It begins like the text of `ids`.

        If ids are decoded and the text is encoded again, the number of tokens often differs. Therefore the text is cut,
        or text of the first ids is appended, until the number is right, at most `MAX_FITS` times.
        """
        num_tokens = len(ids)
        if not num_tokens:
            return ""
        text, best = self.decode(ids), ""
        for _ in range(MAX_FITS):
            encoded = self.encode(text)
            if not best or abs(len(encoded) - num_tokens) < abs(self.count(best) - num_tokens):
                best = text
            if len(encoded) == num_tokens:
                break
            missing = num_tokens - len(encoded)
            text = self.decode(encoded[:num_tokens]) if missing < 0 else text + self.decode(ids[:missing])
        return best

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigurationError("Prompts as text require --tokenizer; or send token ids with --send ids.")
        return self._tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and its output length. Exactly one of `text`, `ids` and `messages` is set."""

    output_tokens: int
    prompt_tokens: int | None  # None: the tokens were not counted
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Random prompts without common prefixes. Lengths are uniform in [length * range_ratio, length]."""

    input_tokens: int = 1024
    output_tokens: int = 1024
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio <= 1:
            raise ConfigurationError(f"The range ratio must be in [0, 1], not {self.range_ratio}.")
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ConfigurationError("Input and output lengths must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Groups of prompts. Each group shares a system prompt, and each prompt has its own question."""

    groups: int = 64
    prompts_per_group: int = 16
    system_prompt_tokens: int = 2048
    question_tokens: int = 128
    output_tokens: int = 256

    def __post_init__(self) -> None:
        if min(self.groups, self.prompts_per_group, self.question_tokens, self.output_tokens) < 1:
            raise ConfigurationError("Groups, prompts, questions and outputs must be at least 1.")
        if self.system_prompt_tokens < 0:
            raise ConfigurationError("The system prompt must not have a negative length.")


def random_prompts(
    lengths: RandomLengths, num_prompts: int, seed: int, vocabulary: Vocabulary, *, as_text: bool
) -> list[Prompt]:
    """Return the prompts of the `random-ids` workload of SGLang's serving benchmark.

    Input lengths, output lengths and offsets are drawn in this order from the same generator as in SGLang, so that
    equal seeds give equal lengths. (An output length of 0, possible with a ratio of 0, becomes 1.) Prompt i consists of
    the ids offset + i, offset + i + 1, ..., modulo the size of the vocabulary.
    """
    random = np.random.RandomState(seed)

    def draw(length: int, low: int) -> list[int]:
        return random.randint(low, length + 1, size=num_prompts).tolist()

    ratio = lengths.range_ratio
    inputs = draw(lengths.input_tokens, max(int(lengths.input_tokens * ratio), 1))
    outputs = [max(n, 1) for n in draw(lengths.output_tokens, int(lengths.output_tokens * ratio))]
    offsets = random.randint(0, len(vocabulary.ids), size=num_prompts).tolist()
    return [
        _prompt([vocabulary.run(offset + number, length)], output, vocabulary, as_text)
        for number, (offset, length, output) in enumerate(zip(offsets, inputs, outputs))
    ]


def shared_prefix_prompts(shape: SharedPrefixes, seed: int, vocabulary: Vocabulary, *, as_text: bool) -> list[Prompt]:
    """Return the prompts of all groups, in random order."""
    random = np.random.RandomState(seed)

    def draw(length: int) -> list[int]:
        return vocabulary.ids[random.randint(0, len(vocabulary.ids), size=length)].tolist()

    prompts: list[Prompt] = []
    for _ in range(shape.groups):
        system = draw(shape.system_prompt_tokens)
        for _ in range(shape.prompts_per_group):
            parts = [system, draw(shape.question_tokens)]
            prompts.append(_prompt(parts, shape.output_tokens, vocabulary, as_text))
    return [prompts[i] for i in random.permutation(len(prompts))]


def _prompt(parts: Sequence[list[int]], output: int, vocabulary: Vocabulary, as_text: bool) -> Prompt:
    if not as_text:
        ids = tuple(id for part in parts for id in part)
        return Prompt(ids=ids, prompt_tokens=len(ids), output_tokens=output)
    # Each part is converted separately, so that a shared system prompt has the same text in all prompts.
    text = "".join(vocabulary.text_of(part) for part in parts)
    return Prompt(text=text, prompt_tokens=vocabulary.count(text), output_tokens=output)


def file_prompts(
    path: str, vocabulary: Vocabulary | None, *, num_prompts: int | None, output_tokens: int | None
) -> list[Prompt]:
    """Return the prompts of a JSONL file.

    Each line has `prompt` (text or token ids) or `messages`, and may have `output_len`. `output_tokens` is the output
    length of lines without `output_len`. Raises `ConfigurationError` with the number of an invalid line.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"The file {path} does not exist.")
    with file.open(encoding="utf-8") as lines:
        numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if num_prompts is not None and num_prompts > len(numbered):
        raise ConfigurationError(f"{path} has {len(numbered)} prompts, not {num_prompts}.")
    return [_read_line(f"{path}:{n}", line, vocabulary, output_tokens) for n, line in numbered[:num_prompts]]


def _read_line(line_name: str, line: str, vocabulary: Vocabulary | None, output_tokens: int | None) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{line_name} is not JSON.") from error
    output = record.get("output_len", output_tokens) if isinstance(record, dict) else None
    if not isinstance(output, int) or output < 1:
        raise ConfigurationError(f"{line_name} has no valid output_len, and --file-output-len is not set.")
    prompt, messages = record.get("prompt"), record.get("messages")
    counted = vocabulary if vocabulary is not None and vocabulary.has_text else None
    if isinstance(prompt, str) and prompt:
        count = counted.count(prompt) if counted else None
        return Prompt(text=prompt, prompt_tokens=count, output_tokens=output)
    if isinstance(prompt, list) and prompt and all(isinstance(id, int) for id in prompt):
        return Prompt(ids=tuple(prompt), prompt_tokens=len(prompt), output_tokens=output)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Prompt(messages=tuple(messages), prompt_tokens=None, output_tokens=output)
    raise ConfigurationError(f"{line_name} must have a prompt (text or token ids) or a list of messages.")


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the times at which `num` requests are sent, in seconds after the start. All are 0 for an infinite `rate`.

    The gaps follow a gamma distribution with mean 1 / rate and shape `burstiness`: 1 gives a Poisson process, smaller
    values give burstier arrivals, larger values more regular ones. The first request is sent at 0.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigurationError("The request rate and the burstiness must be above 0.")
    if rate == float("inf"):
        return [0.0] * num
    gaps = np.random.RandomState(seed).gamma(burstiness, 1 / (rate * burstiness), size=num)
    return (np.cumsum(gaps) - gaps[0]).tolist() if num else []
