"""The joined pieces of a stream equal the whole text, for any script and any division (R15 of docs/reliability.md)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from tokenizers import Tokenizer as Library

import fake_core
import tiny_tokenizers
from runtime.actors.choice_decoder import ChoiceDecoder
from runtime.request import Delta, Finish, Request, Usage
from runtime.sampling_params import SamplingParams
from runtime.tokenizer.backend import FastBackend
from runtime.tokenizer.tokenizer import Tokenizer
from serve.demo import demo_path
from served_core import Serve

KINDS = ("byte_bpe", "metaspace", "demo")
WORDS = (
    *("Once upon a time", "naïve café", "Привет, мир", "Καλημέρα κόσμε", "שלום עולם", "مرحبا بالعالم"),
    *("नमस्ते दुनिया", "สวัสดีชาวโลก", "こんにちは、世界。", "你好，世界", "안녕하세요 세계", "𠜎𠜱𡃁", "𐍈𐌰𐌿", "ქართული"),
    *("አማርኛ", "தமிழ்", "မြန်မာ", "👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "❤️", "1️⃣", "🧑🏿‍🤝‍🧑🏻"),
    *("e\u0301\u0323", "a\u0308\u0304", "n\u0303o\u0302", "\u202bעברית\u202c", "\u2067عربى\u2069"),
    *("\u200b", "\ufeff", "\u00ad", "\n\n", "\t", "  ", " ", "```py\n", "<b>&amp;", "\\n", "∑∫√"),
)  # fmt: skip
MANY = pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])


class Case(NamedTuple):
    kind: str
    ids: list[int]
    stops: tuple[str, ...]
    keep: bool
    expected: str
    matched: str | None

    @classmethod
    def draw(cls, tokenizers: dict[str, Tokenizer], draw: random.Random) -> Case:
        kind = draw.choice(KINDS)
        text = "".join(draw.choice(WORDS) + draw.choice(["", "", " ", "\n"]) for _ in range(draw.randrange(1, 12)))
        [ids] = tokenizers[kind].encode_batch([text], add_special_tokens=False)
        # the library's decoding, which may normalise the text
        text = tokenizers[kind].backend.decode(ids, True)
        stops = tuple(_stop(text, draw) for _ in range(draw.choice([0, 0, 1, 2, 3])))
        keep = draw.random() < 0.5
        ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
        if not ends:
            return cls(kind, ids, stops, keep, text, None)
        first = min(end for end, _ in ends)
        matched = max((stop for end, stop in ends if end == first), key=len)
        return cls(kind, ids, stops, keep, text[: first if keep else first - len(matched)], matched)


def _stop(text: str, draw: random.Random) -> str:
    """Return a part of the text, possibly from the middle of a cluster, or a text that may not occur in it."""
    if not text or draw.random() < 0.25:
        return draw.choice(WORDS)
    start = draw.randrange(len(text))
    return text[start : start + draw.randrange(1, 9)]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    found = {kind: Tokenizer(FastBackend(tiny_tokenizers.build(kind)[0]), {}) for kind in ("byte_bpe", "metaspace")}
    found["demo"] = Tokenizer(FastBackend(Library.from_file(str(Path(demo_path() or "") / "tokenizer.json"))), {})
    return found


@pytest.mark.parametrize("num_cases", [400, MANY])
def test_pieces_are_the_whole(tokenizers: dict[str, Tokenizer], num_cases: int) -> None:
    draw = random.Random(0)
    num_matched = 0
    for _ in range(num_cases):
        case = Case.draw(tokenizers, draw)
        sampling = SamplingParams(stop=case.stops, no_stop_trim=case.keep, max_new_tokens=len(case.ids))
        request = Request(ids=(), sampling=sampling)
        decoder = ChoiceDecoder(request, tokenizers[case.kind], draw.choice([1, 1, 3]))
        text, ids, matched = "", [], None
        start = 0
        while start < len(case.ids) and matched is None:
            end = min(start + draw.choice([1, 1, 1, 2, 5]), len(case.ids))
            finish = Finish("length", length=end) if end == len(case.ids) else None
            chunk = decoder.push(Delta(0, 0, case.ids[start:end], finish, Usage(0, end, 0)))
            start = end
            if chunk is not None:
                text += chunk.text
                ids += chunk.ids
                matched = chunk.finish.matched if chunk.finish is not None else None
        assert (text, matched) == (case.expected, case.matched), case
        assert ids == case.ids[: len(ids)]
        num_matched += matched is not None
    assert num_cases / 4 < num_matched < num_cases * 3 / 4


@pytest.mark.parametrize("num_cases", [30, MANY])
async def test_pieces_over_http_are_the_whole(tokenizers: dict[str, Tokenizer], serve: Serve, num_cases: int) -> None:
    draw = random.Random(1)
    said: list[int] = []
    facts = fake_core.make_facts(vocab_size=max(each.vocab_size for each in tokenizers.values()))
    servers = {
        kind: await serve(fake_core.FakeCore(tokenizer, ids_of=lambda *_: said, facts=facts))
        for kind, tokenizer in tokenizers.items()
    }
    for number in range(num_cases):
        case = Case.draw(tokenizers, draw)
        if not case.ids:
            continue
        said[:] = case.ids
        # the limits of every client's request
        stops = {"stop": [*case.stops], "no_stop_trim": case.keep} if case.stops else {}
        if number % 2:
            sampling = {**stops, "max_new_tokens": len(case.ids)}
            body = {"input_ids": [1], "sampling_params": sampling, "incremental": True}
            events = await servers[case.kind].events("/generate", **body)
            text, whole = "".join(event["text"] for event in events), {"path": "/generate", **body}
            body["stream"] = False
            answer = await servers[case.kind].post("/generate", **body)
            assert answer["text"] == text, whole
        else:
            body = {"prompt": [1], "max_tokens": len(case.ids), **stops}
            events = await servers[case.kind].events("/v1/completions", **body)
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            answer = await servers[case.kind].post("/v1/completions", **body)
            assert answer["choices"][0]["text"] == text
        assert text == case.expected, orjson.dumps(case._asdict())
