"""The bound never exceeds the real number of tokens, and refuses enormous texts immediately."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import tiny_tokenizers
from runtime.errors import ContextOverflow
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.text_limit import CHARS_AT_ONCE, TextLimit, give_back_memory, text_limit_of

PIECES = [
    "a",
    "the ",
    "  ",
    "\n\n\n",
    "é",
    "e\u0301",
    "α\u0313\u0300\u0345",
    "한",
    "\u1112\u1161\u11ab",
    "𝐀",
    "ﷺ",
    "<|end|>",
    "😀",
    "\x00",
]


def limit_of(library: Tokenizer) -> TextLimit | None:
    return text_limit_of(FastBackend(library))


@pytest.mark.parametrize("kind", ["byte_bpe", "metaspace"])
@pytest.mark.parametrize("normalizer", [None, "NFC", "NFKC"])
@pytest.mark.parametrize("strips", [False, True])
def test_no_text_has_fewer_tokens_than_the_bound(
    tmp_path: Path, kind: tiny_tokenizers.Kind, normalizer: str | None, strips: bool
) -> None:
    tiny_tokenizers.write(tmp_path, kind)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if normalizer is not None:
        steps = [getattr(normalizers, normalizer)(), *([library.normalizer] if library.normalizer else [])]
        library.normalizer = normalizers.Sequence(steps)
    library.add_special_tokens([AddedToken("<|end|>", lstrip=strips, rstrip=strips)])
    limit = limit_of(library)
    assert limit is not None
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 60)))
        least = max(limit.least_tokens(parts, 1) for parts in ([text], [text[:7], text[7:]]))
        assert least <= len(library.encode(text, add_special_tokens=False).ids), text


def test_tokenizers_that_drop_text_have_no_bound(tmp_path: Path) -> None:
    tiny_tokenizers.write(tmp_path, "wordpiece")
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert limit_of(library) is None
    unknown = Tokenizer(models.BPE(vocab={"a": 0, "[UNK]": 1}, merges=[], unk_token="[UNK]", fuse_unk=True))
    assert limit_of(unknown) is None
    tiny_tokenizers.write(tmp_path, "byte_bpe")
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    assert limit_of(library) is None
    library.normalizer = normalizers.Replace(tokenizers.Regex("x+"), "")
    assert limit_of(library) is None
    library.normalizer = None  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    assert limit_of(library) is None


def test_a_text_far_too_long_is_refused_and_others_are_not() -> None:
    limit = TextLimit(10, ignores_spaces=False)
    for check in (limit.check, lambda parts, context: limit.check_length("".join(parts), context)):
        check(["a" * 1000], 100)
        with pytest.raises(ContextOverflow, match="1010 characters, at least 101 tokens"):
            check(["a" * 1000, "a" * 10], 100)
        check(["😀" * 252], 100)
    with pytest.raises(ContextOverflow):
        limit.check(["😀" * 253], 100)  # four bytes each
    many = CHARS_AT_ONCE + 1  # in two pieces
    limit.check(["a" * 10 * many], many)
    with pytest.raises(ContextOverflow):
        limit.check(["é", "a" * 10 * many, "é" * 4], many)
    sparse = TextLimit(10, ignores_spaces=True)
    sparse.check([" " * 100_000 + "a"], 100)
    sparse.check_length("a" * 2000, 100)  # the text may be whitespace
    with pytest.raises(ContextOverflow):
        sparse.check([" " * CHARS_AT_ONCE + "a" * 1000, " ", "a" * 10], 100)


def test_memory_is_given_back_wherever_that_is_possible() -> None:
    give_back_memory()
