from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, normalizers

import tiny_tokenizers
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.tokenizer import words
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.tokenizer import Tokenizer
from runtime.tokenizer.words import Words, words_of

PARTS = (
    *"aé你,.-ßİΣς가🙂_",
    "engine",
    "ing",
    "##s",
    "q" * 120,
    "[MASK]",
    "[SEP",
    "e\u0301",
    "\u0301",
    "\ufb01",
    "\u1100\u1161",
)
PARTS += (*" " * 12, "\t", "\n", "\u00a0", "\u3000", "\u200b", "\0", "\x1c", "\ufffd")


def library(**settings: bool):
    made, _ = tiny_tokenizers.build("wordpiece")
    made.normalizer = normalizers.BertNormalizer(**settings)
    made.add_special_tokens([AddedToken("[MASK]", lstrip=True), AddedToken("engines", single_word=True)])
    return made


def made_of(kind) -> Words:
    made = words_of(kind)
    assert made is not None
    return made


@pytest.mark.parametrize("settings", [{}, {"lowercase": False}, {"strip_accents": False}, {"clean_text": False}])
def test_gives_the_ids_of_the_whole_text(settings):
    theirs, draw = library(**settings), random.Random(0)
    ours = made_of(theirs)
    for _ in range(1500):
        text = "".join(draw.choices(PARTS, k=draw.randrange(24)))
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special).ids, repr(text)


def test_keeps_so_many_words_and_no_long_ones(monkeypatch):
    monkeypatch.setattr(words, "MAX_WORDS", 10)
    ours = made_of(library())
    for number in range(50):
        ours.encode(f"{number} {'9' * (words.MAX_WORD_CHARS + 1)}", False)
        assert 0 < len(ours._ids) <= 10
        assert max(map(len, ours._ids)) <= words.MAX_WORD_CHARS


def test_knows_a_word_that_it_has_seen(monkeypatch):
    ours = made_of(library())
    before = ours.encode("an engine", True)
    monkeypatch.setattr(ours, "_encode", None)
    assert ours.encode("an engine", True) == before


def test_is_not_made_where_words_are_not_apart():
    bytewise, _ = tiny_tokenizers.build("byte_bpe")
    assert words_of(bytewise) is None
    spaced = library()
    spaced.add_tokens(["two words"])
    assert words_of(spaced) is None


def test_a_tokenizer_uses_it_for_short_texts_and_refuses_as_before(monkeypatch):
    asked = []
    monkeypatch.setattr(Words, "encode", lambda _, text, special: asked.append(text) or [7, 7])
    tokenizer = Tokenizer(FastBackend(library()), {})
    assert tokenizer.encode_batch(["a b"]) == [[7, 7]]
    with pytest.raises(ContextOverflow):
        tokenizer.encode_batch(["a b"], max_tokens=1)
    tokenizer.encode_batch(["a" * words.MAX_CHARS, "b"])
    assert asked == ["a b", "a b"]
    monkeypatch.undo()
    with pytest.raises(InvalidRequest):
        tokenizer.encode_batch(["a \ud83d"])
