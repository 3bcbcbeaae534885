"""Constrained outputs in every API, on the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import openai
import pytest

import http_server
from random_schemas import SchemaWriter
from runtime.errors import InvalidRequest
from serve import Engine
from serve.server.app import build_app

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe somebody as JSON."}]
RESPONSE_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Engine]:
    async with Engine(random_seed=1, **options) as engine:
        yield engine
        status = engine.status()
        assert (status.num_running, status.num_waiting, status.num_used_pages) == (0, 0, 0)
        engine.core.check()


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Any, str]]:
    async with (
        running(**options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, url


async def test_response_format_of_the_official_client() -> None:
    ask: dict[str, Any] = {"model": "penstock-demo", "messages": ASK, "max_tokens": 300, "temperature": 1}
    async with connected() as (client, _):
        for strict in (True, False):
            named = {**RESPONSE_FORMAT["json_schema"], "strict": strict}
            answer = await client.chat.completions.create(
                **ask, seed=3, response_format={"type": "json_schema", "json_schema": named}
            )
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
        stream = await client.chat.completions.create(**ask, seed=3, response_format=RESPONSE_FORMAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == answer.choices[0].message.content
        answer = await client.chat.completions.create(
            **ask, seed=4, n=3, response_format=RESPONSE_FORMAT, logprobs=True, top_logprobs=2
        )
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


@pytest.mark.parametrize(
    ("body", "check"),
    [
        ({"guided_json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
        ({"guided_regex": "^[a-c]{3}-\\d{2}$"}, lambda text: text[3] == "-" and len(text) == 6),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_grammar": 'root ::= "(" ("x" | "y"){1,3} ")"'}, lambda text: text.strip("()xy") == ""),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, lambda text: '": ' not in text),
        ({"lark": 'start: "<" /[a-z]{1,9}/ ">"'}, lambda text: text[0] + text[-1] == "<>"),
    ],
)
async def test_spellings_of_the_openai_bodies(body: dict[str, Any], check: Any) -> None:
    async with connected() as (client, _):
        answer = await client.completions.create(
            model="penstock-demo", prompt="Say it:", max_tokens=300, temperature=1, seed=5, extra_body=body
        )
        assert answer.choices[0].finish_reason == "stop"
        assert check(answer.choices[0].text) in (None, True)


NATIVE: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    ({"regex": "[ab]{2,5}!"}, lambda text: text.endswith("!")),
    ({"choice": ["a", "ab", "abc"]}, lambda text: text in ("a", "ab", "abc")),
    ({"ebnf": 'root ::= [0-9]{2} "." [0-9]{1,4} ";"'}, lambda text: text.endswith(";")),
    ({"lark": 'start: %json {"type": "boolean"}'}, lambda text: text in ("true", "false")),
]


@pytest.mark.parametrize("tokens", [{}, {"disable_overlap_schedule": True}, {"chunked_prefill_size": 16}])
async def test_native_parameters_in_one_batch_with_free_ones(tokens: dict[str, Any]) -> None:
    async with running(**tokens) as engine:
        params = [{**params, "max_new_tokens": 300, "temperature": 1.0, "seed": 7} for params, _ in NATIVE]
        free = {"max_new_tokens": 20, "temperature": 1.0, "seed": 7}
        answers = await engine.generate(["Say it:"] * (len(params) + 1), [*params, free])
        for answer, (_, check) in zip(answers, NATIVE, strict=False):
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            assert check(answer["text"]) in (None, True)
        assert answers[-1] == {
            **await engine.generate("Say it:", free),
            "meta_info": answers[-1]["meta_info"],
            "index": len(params),
        }


async def test_the_same_seed_gives_the_same_text_alone_and_when_it_was_retracted() -> None:
    params = {"json_schema": SCHEMA, "max_new_tokens": 120, "temperature": 1.0, "seed": 11, "n": 4}
    async with running() as engine:
        alone = await engine.generate("Say it:", params)
    small = {
        "max_total_tokens": 256,
        "page_size": 16,
        "schedule_conservativeness": 0.0,
        "context_length": 256,
    }
    async with running(**small) as engine:
        found = await asyncio.gather(*(engine.generate("Say it:", params) for _ in range(3)))
        assert engine.status().num_retracted > 0
    for answers in found:
        assert [each["output_ids"] for each in answers] == [each["output_ids"] for each in alone]


async def test_logprobs_are_of_what_the_grammar_allows() -> None:
    async with running() as engine:
        answer = await engine.generate(
            "Say it:",
            {"choice": ["yes", "no"], "temperature": 0.0},
            return_logprob=True,
            top_logprobs_num=5,
            return_text_in_logprobs=True,
        )
    first = [text for logprob, _, text in answer["meta_info"]["output_top_logprobs"][0] if logprob > -1e30]
    assert first
    assert all("yes".startswith(text) or "no".startswith(text) for text in first)


@pytest.mark.parametrize("extra", [{"ignore_eos": True}, {"min_new_tokens": 30}])
async def test_an_output_that_can_only_end_ends(extra: dict[str, Any]) -> None:
    async with running() as engine:
        answer = await engine.generate("Say it:", {"choice": ["yes", "no"], "max_new_tokens": 60, **extra})
        assert answer["text"] in ("yes", "no")
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


async def test_min_new_tokens_and_ignore_eos_go_on_while_the_grammar_lets_them() -> None:
    async with running() as engine:
        for extra, least in (({"min_new_tokens": 20}, 20), ({"ignore_eos": True}, 40)):
            answer = await engine.generate("Say it:", {"regex": "[ab]+", "max_new_tokens": 40, "seed": 1, **extra})
            assert answer["meta_info"]["completion_tokens"] >= least
            assert set(answer["text"]) <= {"a", "b"}


async def test_further_stop_ids_may_end_an_output_where_the_grammar_does() -> None:
    async with running() as engine:
        think = 4090  # <think>, which a grammar does not allow on its own
        params = {
            "choice": ["yes"],
            "stop_token_ids": [think],
            "logit_bias": {think: 100},
            "max_new_tokens": 9,
        }
        answer = await engine.generate("Say it:", params)
        assert answer["text"] == "yes"
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": think}


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        (
            {"json_schema": {"properties": {"a": {"uniqueItems": True}}}},
            "sampling_params.json_schema",
            "/properties/a/uniqueItems",
        ),
        ({"json_schema": "{"}, "sampling_params.json_schema", "not JSON"),
        ({"regex": "(?=a)"}, "sampling_params.regex", "look-around"),
        ({"regex": "", "choice": ["a"]}, "sampling_params.choice", "exclude"),
        ({"choice": []}, "sampling_params.choice", "non-empty"),
        ({"regex": "(([a-z]{1,50}){1,50}){1,50}"}, "sampling_params.regex", "repetitions are nested"),
        ({"ebnf": "root ::= other"}, "sampling_params.ebnf", "no rule named other"),
        ({"lark": 'start: %json {"uniqueItems": true}'}, "sampling_params.lark", "uniqueItems"),
        (
            {"structural_tag": {"structures": [], "triggers": []}},
            "sampling_params.structural_tag",
            "structures",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_a_400_that_says_why(params: Any, param: str, words: str) -> None:
    async with connected() as (_, url), httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            body = {"text": "x", "sampling_params": params, "stream": stream}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == param
            assert words in error["message"]


async def test_a_constraint_that_leaves_nothing_is_the_requests_fault() -> None:
    async with connected() as (client, _):
        extra = {"regex": "z", "bad_words": ["z"]}
        with pytest.raises(openai.BadRequestError, match="allows no token, or exceeds a limit"):
            await client.chat.completions.create(model="penstock-demo", messages=ASK, extra_body=extra)


async def test_a_refused_schema_is_named_in_the_words_of_the_chat_api() -> None:
    async with connected() as (client, _):
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="penstock-demo", messages=ASK, response_format=wrong)
        assert caught.value.param == "response_format.json_schema"
        assert "uniqueItems at /uniqueItems" in caught.value.message


async def test_a_tool_that_cannot_be_enforced_is_named() -> None:
    nothing = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    async with connected() as (client, _):
        for wrong, problem in (
            (
                {"unevaluatedItems": False},
                "unevaluatedItems at tools/add/parameters/properties/x/unevaluatedItems: ",
            ),
            (nothing, "schema at tools/add/parameters/properties/x: no value satisfies it"),
        ):
            parameters = {"type": "object", "properties": {"x": wrong}, "required": ["x"]}
            functions = [{"name": "other"}, {"name": "add", "parameters": parameters}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="penstock-demo",
                    messages=ASK,
                    tools=[{"type": "function", "function": each} for each in functions],
                    tool_choice="required",
                )
            assert caught.value.param == "tools"
            assert problem in caught.value.message


@pytest.mark.parametrize("options", [{"grammar_backend": "none"}, {"skip_tokenizer_init": True}])
async def test_without_a_backend_a_grammar_is_refused(options: dict[str, Any]) -> None:
    async with running(**options) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(input_ids=[5, 6], sampling_params={"regex": "a"})
        assert caught.value.param == "regex"


@pytest.mark.parametrize(
    "number",
    [pytest.param(64, marks=pytest.mark.slow), pytest.param(1_000, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
async def test_every_finished_output_of_many_schemas_validates(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """At temperature 1: each request ends, is refused with 400, or was cut off; what ended is valid.

    The penalty is for the small model's way to repeat a digit or a word for ever.
    """
    ends: Counter[str] = Counter()
    async with running() as engine:

        async def ask(seed: int) -> None:
            schema = SchemaWriter(seed).schema()
            sampling = {
                "json_schema": schema, "temperature": 1, "max_new_tokens": 300, "frequency_penalty": 1.0, "seed": seed
            }  # fmt: skip
            try:
                answer = await engine.generate("Some JSON:", sampling)
            except InvalidRequest:
                ends["refused"] += 1
                return
            kind = answer["meta_info"]["finish_reason"]["type"]
            ends[kind] += 1
            if kind != "stop":
                return
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            assert validator.is_valid(json.loads(answer["text"])), (schema, answer["text"])

        for start in range(0, number, 32):
            await asyncio.gather(*(ask(seed) for seed in range(start, min(start + 32, number))))
    with capsys.disabled():
        print(dict(ends))
    assert ends["stop"] > number / 2, ends
    assert ends["refused"] < number / 4, ends


async def test_chats_take_grammars_and_nested_formats_as_response_format() -> None:
    number = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    tag = {"type": "tag", "begin": "<n>", "content": number, "end": "</n>"}
    ask: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30, "temperature": 0}
    async with Engine() as engine:
        for asked, pattern in (
            ({"type": "grammar", "grammar": 'root ::= "z" [0-9]'}, "z[0-9]"),
            ({"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}, "hello"),
            ({"type": "structural_tag", "format": tag}, "<n>-?[0-9]+</n>"),
        ):
            answer = await engine.chat(**ask, response_format=asked)
            assert re.fullmatch(pattern, answer.choices[0].message.content or ""), asked
