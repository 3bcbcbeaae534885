"""Tokens that an output may have: allowed_token_ids and bad_words in every API, with the demo model."""

from __future__ import annotations

import httpx
import pytest

import http_server
from runtime.errors import InvalidRequest
from serve import Engine
from serve.server.app import build_app

PROMPT = "The capital of France is"


async def test_outputs_keep_to_allowed_tokens_and_avoid_bad_words() -> None:
    async with Engine(random_seed=1) as engine:
        tokenizer = engine.core.tokenizer
        assert tokenizer is not None
        greedy = {"temperature": 0, "max_new_tokens": 12}
        usual = await engine.generate(PROMPT, greedy)
        first = usual["output_ids"][0]
        word = tokenizer.token_text(first).strip()
        assert word

        allowed = sorted(set(usual["output_ids"][3:6]))
        for temperature in (0, 1.5):
            only = {"temperature": temperature, "max_new_tokens": 30, "allowed_token_ids": allowed, "n": 2}
            answers = await engine.generate(PROMPT, only)
            for answer in answers:
                assert set(answer["output_ids"]) <= set(allowed)
                assert len(answer["output_ids"]) == 30

        banned = await engine.generate(PROMPT, {**greedy, "bad_words": [word]})
        assert banned["output_ids"][0] != first
        assert word not in [tokenizer.token_text(token_id).strip() for token_id in banned["output_ids"]]

        with pytest.raises(InvalidRequest, match="exclude each other"):
            await engine.generate(PROMPT, {"allowed_token_ids": allowed, "regex": "a"})
        with pytest.raises(InvalidRequest, match="only words of a single token"):
            await engine.generate(PROMPT, {"bad_words": ["antidisestablishmentarianism"]})

        async with (
            http_server.serving(build_app(engine.core)) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "bad_words": [word]}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == tokenizer.decode(banned["output_ids"][:8])
            short = {"prompt": PROMPT, "max_tokens": 2, "truncate_prompt_tokens": 3}
            assert (await client.post("/v1/completions", json=short)).json()["usage"]["prompt_tokens"] == 3
