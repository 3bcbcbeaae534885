"""Baichuan's tokenizer (a sentencepiece model with custom code), compared with sentencepiece."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

import tiny_checkpoints
from runtime.config.plan import TokenizerPlan
from runtime.errors import ConfigurationError
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer.tokenizer import Tokenizer
from serve import Engine

WORDS = ("hello", "world", "the", "quick", "brown", "你好", "世界", "百川", "größe", "1234", "👩")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONFIG = {
    "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
    "tokenizer_class": "BaichuanTokenizer",
    "add_bos_token": False,
    **{name: {"__type": "AddedToken", "content": text} for name, text in SPECIAL.items()},
}


@pytest.fixture(scope="module", params=[True, False], ids=["space-added", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, draw = tmp_path_factory.mktemp("pieces"), random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(300)]
    with (made / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=400,
            hard_vocab_limit=False,
            byte_fallback=True,
            add_dummy_prefix=request.param,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<reserved_106>", "<reserved_107>"],
            minloglevel=2,
        )
    (made / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    model = library(made)
    turns = {f"{who}_token_id": model.piece_to_id(f"<reserved_{n}>") for who, n in (("user", 106), ("assistant", 107))}
    (made / "generation_config.json").write_text(json.dumps(turns))
    return made


def library(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def load(folder: Path) -> Tokenizer:
    plan = TokenizerPlan(
        tokenizer_path=str(folder), mode="auto", trust_remote_code=False, revision=None, chat_template=None
    )
    files = read_tokenizer(plan)
    return Tokenizer(files.backend, files.special)


def test_texts_are_those_of_sentencepiece(folder: Path) -> None:
    ours, theirs, draw = load(folder), library(folder), random.Random(1)
    texts = [
        "",
        " ",
        "a",
        "  two  spaces ",
        *("".join(draw.choices([*WORDS, " ", "\n", "é", "z"], k=20)) for _ in range(60)),
    ]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids) == text
        decoder = ours.decoder(())
        assert "".join(decoder.push([token_id]) for token_id in ids) + decoder.flush() == text
    assert ours.vocab_size == theirs.vocab_size()


def test_special_tokens_are_found_in_texts_and_left_out(folder: Path) -> None:
    ours, theirs = load(folder), library(folder)
    [ids] = ours.encode_batch(["hello</s>world"])
    assert ids == [*theirs.encode("hello"), theirs.eos_id(), *theirs.encode("world")]
    assert "</s>" in ours.decode(ids, skip_special_tokens=False)
    assert "</s>" not in ours.decode(ids)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id(), {theirs.eos_id()})
    pair = ours.encode_pair("hello", "world")
    assert pair.ids[pair.second :] == theirs.encode("world")


async def test_a_chat_is_answered_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    model = library(folder)
    path = tiny_checkpoints.write(tmp_path, "baichuan", vocab_size=model.vocab_size())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    turns = json.loads((folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, **turns}))
    user, assistant = turns.values()
    prompt = [*model.encode("be brief"), user, *model.encode("hello world"), assistant]
    reference: Any = tiny_checkpoints.auto_of(path).from_pretrained(tiny_checkpoints.readable(path))
    expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6, eos_token_id=None)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}]
    async with Engine(model_path=path, log_level="error") as engine:
        answer = await engine.chat(messages, temperature=0, max_tokens=6, ignore_eos=True)
    assert answer.usage.prompt_tokens == len(prompt)
    before, whole = (load(folder).decode(ids) for ids in (prompt, expected[0].tolist()))
    assert answer.choices[0].message.content == whole.removeprefix(before)


def test_what_cannot_be_read_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "eos_token": "<none>"}))
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    with pytest.raises(ConfigurationError, match="lacks the tokens <none>"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"broken")
    with pytest.raises(ConfigurationError, match="not a sentencepiece model"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "tokenizer_class": "Other"}))
    with pytest.raises(ConfigurationError, match="--trust-remote-code"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigurationError, match=r"penstock\[sentencepiece\]"):
        load(folder)
