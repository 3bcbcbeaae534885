from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

import tiny_tokenizers
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.incremental import MAX_HELD, IncrementalDecoder
from runtime.tokenizer.tokenizer import Tokenizer

TOKENIZERS = {kind: Tokenizer(FastBackend(tiny_tokenizers.build(kind)[0]), {}) for kind in tiny_tokenizers.KINDS}
kinds = st.sampled_from(tiny_tokenizers.KINDS)
BEYOND = 600  # ids beyond the vocabulary of 512, as dummy weights may sample
some_ids = st.lists(st.integers(0, BEYOND), max_size=40)


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool = True) -> str:
    incremental = tokenizer.decoder(prompt, skip, True)
    return "".join([incremental.push(piece) for piece in pieces]) + incremental.flush()


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(min(place, len(ids)) for place in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def whole(kind: str, ids: list[int], skip: bool) -> str:
    """Decode with the library. With byte fallback, the library drops a whole run for one invalid byte."""
    backend = TOKENIZERS[kind].backend
    if kind != "metaspace":
        return backend.decode(ids, skip)
    tokens = [backend.token(i) for i in ids if not (skip and i in backend.special_ids)]
    data = b"".join(
        bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode()
        for token in tokens
        if token is not None
    )
    return data.decode(errors="replace").removeprefix(" ")


def added(kind: str, prompt: list[int], output: list[int], skip: bool) -> str:
    """Return decode(prompt + output) without decode(prompt). A character that began in the prompt counts as output."""
    before, text = whole(kind, prompt, skip), whole(kind, prompt + output, skip)
    return text[len(before) :] if text.startswith(before) else text[len(before) - 1 :]


@given(kinds, some_ids, some_ids, st.lists(st.integers(0, 40)), st.booleans())
def test_pushes_add_up_to_the_whole_text_for_any_chunking(kind, prompt, output, cuts, skip):
    text = stream(TOKENIZERS[kind], prompt, cut(output, cuts), skip)
    assert text == added(kind, prompt, output, skip)


@given(kinds, st.text(max_size=60), st.lists(st.integers(0, 200)))
def test_streamed_encoding_of_any_text_is_its_decoding(kind, text, cuts):
    tokenizer = TOKENIZERS[kind]
    [ids] = tokenizer.encode_batch([text])
    assert stream(tokenizer, [], cut(ids, cuts)) == tokenizer.decode(ids) == tokenizer.backend.decode(ids, True)


@pytest.mark.parametrize("kind", ["byte_bpe", "metaspace"])
def test_only_complete_characters_are_pushed(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode_batch(["𐍈"], add_special_tokens=False)[0][-4:]
    incremental = tokenizer.decoder([ids[0], *ids])
    assert [incremental.push([token_id]) for token_id in ids] == ["", "", "", "𐍈"]
    assert incremental.flush() == ""


def test_first_generated_word_keeps_its_space_after_a_prompt():
    tokenizer = TOKENIZERS["metaspace"]
    [ids] = tokenizer.encode_batch(["the engine"], add_special_tokens=False)
    assert stream(tokenizer, [], [ids]) == "the engine"
    assert stream(tokenizer, [1], [ids]) == "the engine"
    assert stream(tokenizer, ids, [ids]) == " the engine"


def test_character_begun_in_the_prompt_is_given_whole():
    tokenizer = TOKENIZERS["byte_bpe"]
    [ids] = tokenizer.encode_batch(["𐍈"])
    for border in range(1, len(ids)):
        assert stream(tokenizer, ids[:border], [ids[border:]]) == "𐍈"
        assert stream(tokenizer, ids[:border], [tokenizer.encode_batch(["x"])[0]]) == "x"
        assert stream(tokenizer, ids[:border], []) == ""


def test_special_tokens_are_shown_when_asked():
    tokenizer = TOKENIZERS["byte_bpe"]
    [ids] = tokenizer.encode_batch(["a<|im_end|>b"])
    assert stream(tokenizer, [], [ids], skip=True) == "ab"
    assert stream(tokenizer, [], [ids], skip=False) == "a<|im_end|>b"


def test_invalid_bytes_are_not_held_back():
    tokenizer = TOKENIZERS["byte_bpe"]
    byte = tokenizer.backend.token_id("ÿ")
    assert byte is not None
    incremental = tokenizer.decoder([])
    assert [incremental.push([byte]) for _ in range(5000)] == ["\ufffd"] * 5000


def suffix_tokenizer() -> Tokenizer:
    """Return a tokenizer that marks the ends of words, so its decoder must know which token is the last."""
    library = Library(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, end_of_word_suffix="</w>", special_tokens=["<unk>"]
    )
    library.train_from_iterator(tiny_tokenizers.TEXT.splitlines(), trainer)
    return Tokenizer(FastBackend(library), {})


def test_decoder_that_looks_at_neighbours_is_streamed_through_a_window():
    tokenizer = suffix_tokenizer()
    text = " ".join(tiny_tokenizers.TEXT.split()[:60])
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.bytes_of is None
    assert stream(tokenizer, [], [ids]) == text
    assert (
        stream(tokenizer, ids[:20], [[token_id] for token_id in ids[20:]])
        == (tokenizer.decode(ids)[len(tokenizer.decode(ids[:20])) :])
    )


@pytest.mark.parametrize("token", ["<0x20>", "<0x09>", "<0xE2>", "▁"])
def test_first_token_loses_the_space_that_the_decoder_strips(token):
    tokenizer = TOKENIZERS["metaspace"]
    token_id = tokenizer.backend.token_id(token)
    assert token_id is not None
    [ids] = tokenizer.encode_batch(["ok"], add_special_tokens=False)
    assert tokenizer.decode([token_id, *ids]) == tokenizer.backend.decode([token_id, *ids], True)


def test_added_token_outside_the_byte_alphabet_is_plain_text():
    library, _ = tiny_tokenizers.build("byte_bpe")
    library.add_tokens(["new word é你"])
    tokenizer = Tokenizer(FastBackend(library), {})
    [ids] = tokenizer.encode_batch(["a new word é你!"])
    assert 512 in ids
    assert tokenizer.decode(ids) == "a new word é你!"


def fused_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with an unnecessary second stage, which the table does not support."""
    library, _ = tiny_tokenizers.build("byte_bpe")
    state = json.loads(library.to_str())
    state["decoder"] = {"type": "Sequence", "decoders": [state["decoder"], {"type": "Fuse"}]}
    return Tokenizer(FastBackend(Library.from_str(json.dumps(state))), {})


def test_window_gives_a_character_begun_in_the_prompt_whole():
    tokenizer = fused_tokenizer()
    [ids] = tokenizer.encode_batch(["𐍈!"])
    assert tokenizer.bytes_of is None
    for border in range(1, 4):
        assert stream(tokenizer, ids[:border], [ids[border:]]) == "𐍈!"


def test_window_gives_broken_bytes_after_a_few_tokens():
    tokenizer = fused_tokenizer()
    byte = tokenizer.backend.token_id("ÿ")
    assert byte is not None
    incremental = tokenizer.decoder([])
    pushed = [incremental.push([byte]) for _ in range(3 * MAX_HELD)]
    assert "".join(pushed) == "\ufffd" * (3 * MAX_HELD)
    [ids] = tokenizer.encode_batch(["hello 𐍈!"])
    assert "".join([incremental.push([token_id]) for token_id in ids]) + incremental.flush() == "hello 𐍈!"


@pytest.mark.parametrize("by_window", [False, True])
def test_special_tokens_can_be_shown_one_by_one(by_window: bool) -> None:
    tokenizer = TOKENIZERS["byte_bpe"]
    shown, hidden = sorted(tokenizer.special_ids)[:2]
    [word] = tokenizer.encode_batch(["word"], add_special_tokens=False)
    table = None if by_window else tokenizer.bytes_of
    decoder = IncrementalDecoder(tokenizer.backend, table, (), shown_special_ids=frozenset({shown}))
    text = decoder.push([hidden, *word, shown, hidden, *word]) + decoder.flush()
    assert text == f"word{tokenizer.backend.token(shown)}word"
