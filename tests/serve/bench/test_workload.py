from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.errors import ConfigurationError
from serve.bench.workload import (
    RandomLengths,
    SharedPrefixes,
    Vocabulary,
    arrival_times,
    file_prompts,
    random_prompts,
    shared_prefix_prompts,
)

BARE = Vocabulary.of_size(500)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and thought of other cats"] * 3, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def texts(tokenizer_dir: Path) -> Vocabulary:
    return Vocabulary.of_tokenizer(str(tokenizer_dir))


def write_lines(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return str(path)


def test_random_lengths_stay_in_their_range() -> None:
    lengths = RandomLengths(input_tokens=40, output_tokens=20, range_ratio=0.5)
    prompts = random_prompts(lengths, 300, 7, BARE, as_text=False)
    assert {len(prompt.ids or ()) for prompt in prompts} == set(range(20, 41))
    assert {prompt.output_tokens for prompt in prompts} == set(range(10, 21))
    assert all(prompt.prompt_tokens == len(prompt.ids or ()) for prompt in prompts)


def test_ratio_zero_draws_from_one_token_on() -> None:
    prompts = random_prompts(RandomLengths(input_tokens=4, output_tokens=4), 200, 1, BARE, as_text=False)
    assert {prompt.prompt_tokens for prompt in prompts} == {1, 2, 3, 4}


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_random_lengths_are_those_of_the_fields_generator(ratio: float) -> None:
    random = np.random.RandomState(3)
    inputs = random.randint(max(int(64 * ratio), 1), 65, size=200).tolist()
    outputs = random.randint(int(16 * ratio), 17, size=200).tolist()
    lengths = RandomLengths(input_tokens=64, output_tokens=16, range_ratio=ratio)
    prompts = random_prompts(lengths, 200, 3, BARE, as_text=False)
    assert [prompt.prompt_tokens for prompt in prompts] == inputs
    assert [prompt.output_tokens for prompt in prompts] == [max(length, 1) for length in outputs]


def test_a_seed_decides_the_workload() -> None:
    shape, lengths = SharedPrefixes(groups=3, system_prompt_tokens=5), RandomLengths()
    assert random_prompts(lengths, 9, 5, BARE, as_text=False) == random_prompts(lengths, 9, 5, BARE, as_text=False)
    assert random_prompts(lengths, 9, 5, BARE, as_text=False) != random_prompts(lengths, 9, 6, BARE, as_text=False)
    first = shared_prefix_prompts(shape, 5, BARE, as_text=False)
    assert first == shared_prefix_prompts(shape, 5, BARE, as_text=False)
    assert first != shared_prefix_prompts(shape, 6, BARE, as_text=False)


def test_shared_prefixes_are_shared_in_groups_only() -> None:
    shape = SharedPrefixes(groups=4, prompts_per_group=3, system_prompt_tokens=10, question_tokens=5)
    prompts = shared_prefix_prompts(shape, 1, BARE, as_text=False)
    by_prefix: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for prompt in prompts:
        ids = prompt.ids or ()
        by_prefix.setdefault(ids[:10], set()).add(ids[10:])
    assert [len(questions) for questions in by_prefix.values()] == [3] * 4
    assert all(prompt.prompt_tokens == 15 for prompt in prompts)


def test_texts_have_the_wanted_number_of_tokens(texts: Vocabulary) -> None:
    prompts = random_prompts(RandomLengths(input_tokens=50), 30, 2, texts, as_text=True)
    wanted = random_prompts(RandomLengths(input_tokens=50), 30, 2, texts, as_text=False)
    for prompt, made in zip(prompts, wanted, strict=True):
        assert prompt.prompt_tokens == texts.count(prompt.text or "")
        assert abs((prompt.prompt_tokens or 0) - (made.prompt_tokens or 0)) <= 2


def test_group_texts_start_with_the_same_characters(texts: Vocabulary) -> None:
    shape = SharedPrefixes(groups=1, prompts_per_group=4, system_prompt_tokens=30, question_tokens=6)
    written = [prompt.text or "" for prompt in shared_prefix_prompts(shape, 1, texts, as_text=True)]
    system = texts.text_of(shared_prefix_prompts(shape, 1, texts, as_text=False)[0].ids[:30])  # type: ignore[index]
    assert all(text.startswith(system) for text in written)
    assert len(set(written)) == 4


def test_special_tokens_are_never_drawn(texts: Vocabulary) -> None:
    assert 0 not in texts.ids
    assert texts.decode([0]) == "<|end|>"


def test_text_without_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        random_prompts(RandomLengths(), 1, 1, BARE, as_text=True)


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        Vocabulary.of_tokenizer(str(tmp_path))


def test_file_prompts_keep_order_and_kinds(tmp_path: Path, texts: Vocabulary) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "the cat", "output_len": 5},
        {"prompt": [1, 2, 3]},
        {"messages": chat, "output_len": 6},
    )
    text, ids, messages = file_prompts(path, texts, num_prompts=None, output_tokens=9)
    assert (text.text, text.output_tokens, text.prompt_tokens) == ("the cat", 5, texts.count("the cat"))
    assert (ids.ids, ids.output_tokens, ids.prompt_tokens) == ((1, 2, 3), 9, 3)
    assert (messages.messages, messages.prompt_tokens) == (tuple(chat), None)


@pytest.mark.parametrize("record", [{"prompt": "x"}, {"output_len": 3}, {"prompt": "", "output_len": 3}, [1]])
def test_unusable_lines_are_refused_with_their_number(tmp_path: Path, record: object) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "ok", "output_len": 1}, record)
    with pytest.raises(ConfigurationError, match=r"p\.jsonl:2"):
        file_prompts(path, None, num_prompts=None, output_tokens=None)


def test_more_prompts_than_lines_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "ok", "output_len": 1})
    with pytest.raises(ConfigurationError, match="has 1 prompts, not 2"):
        file_prompts(path, None, num_prompts=2, output_tokens=None)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_spread(burstiness: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, 3)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (5.0, 0.0), (float("nan"), 1.0)])
def test_unusable_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigurationError):
        arrival_times(3, rate, burstiness, 0)
