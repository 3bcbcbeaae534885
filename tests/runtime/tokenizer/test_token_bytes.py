from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

import tiny_tokenizers
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.token_bytes import token_bytes_of
from runtime.tokenizer.tokenizer import Tokenizer

REPLACE = decoders.Replace("▁", " ")


def unigram(prepend_scheme: Any) -> Library:
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>", "</s>", "<e x>"], unk_token="<unk>"
    )
    library.train_from_iterator(tiny_tokenizers.TEXT.splitlines(), trainer)
    return library


def with_decoder(kind: tiny_tokenizers.Kind, decoder: Any) -> Library:
    library, _ = tiny_tokenizers.build(kind)
    library.decoder = decoder
    return library


TABLED = {
    "unigram, always": unigram("always"),
    "unigram, first": unigram("first"),
    "unigram, never": unigram("never"),
    "gemma": with_decoder("metaspace", decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()])),
    "byte level in a sequence": with_decoder("byte_bpe", decoders.Sequence([decoders.ByteLevel()])),
    "wordpiece without cleanup": with_decoder("wordpiece", decoders.WordPiece(cleanup=False)),
    "no decoder": with_decoder("wordpiece", None),
}


@given(st.sampled_from(sorted(TABLED)), st.lists(st.integers(0, 520), max_size=12), st.booleans())
def test_table_says_what_the_decoder_says(name, ids, skip):
    tokenizer = Tokenizer(FastBackend(TABLED[name]), {})
    assert tokenizer.bytes_of is not None
    whole = tokenizer.backend.decode(ids, skip)
    if name != "gemma" or "\ufffd" not in whole:  # invalid bytes: Penstock shows the characters around them
        assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Fuse(), REPLACE]),
    ],
)
def test_decoder_that_looks_further_than_a_token_has_no_table(decoder):
    assert token_bytes_of(FastBackend(with_decoder("metaspace", decoder))) is None
