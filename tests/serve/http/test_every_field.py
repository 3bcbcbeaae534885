"""Every field of a request's body changes the answer, or is refused by name.

Fields that are accepted without effect fail here, and so do fields without a test case.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import httpx
import pytest

from runtime.sampling_params import APIS, NOT_BUILT, Api, parameters
from serve.anthropic.schema import MessagesBody
from serve.calls.chat_completions.schema import ChatBody, CompletionBody
from serve.calls.decode import is_not_built
from serve.calls.generate.schema import GenerateBody
from serve.calls.sampling import sampling_fields, sampling_names
from serve.ollama import schema as ollama
from serve.openai.responses.schema import ResponsesBody
from server_process import serving

pytestmark = pytest.mark.slow
Fields = Mapping[str, Any]
MODEL = "penstock-demo"
OF_THE_MOMENT = {"created", "created_at", "completed_at", "e2e_latency", "eval_duration"}
OF_THE_MOMENT |= {
    "first_token_latency",
    "predicted_first_token_latency",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
}
IDS = {"id", "item_id"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": " a", "schema": SCHEMA, "end": "!"}], "triggers": [" a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STORY = [{"role": "user", "content": "Tell me a story about a fox who lived in a house by the sea."}]
PROMPT = "Once upon a time there was a clever fox called Olaf. Olaf lived in a house by the sea."
A = [275]  # the token " a", which occurs early
THINK = {"enable_thinking": True}
DRAWN = {"temperature": 2.0, "seed": 3}  # random sampling instead of greedy

# Values that must change the answer. A dict also holds the fields that a field needs. `json` marks a dict as the value
# itself.
SAMPLING: Fields = {
    "max_tokens": 3,
    "min_tokens": {"min_tokens": 20, "stop_token_ids": A},
    "temperature": DRAWN,
    "top_n_sigma": {"top_n_sigma": 0.01, **DRAWN},
    "typical_p": {"typical_p": 0.1, **DRAWN},
    "typical": {"typical": 0.1, **DRAWN},
    "xtc_probability": {"xtc_probability": 1.0, **DRAWN},
    "xtc_threshold": {"xtc_threshold": 0.4, "xtc_probability": 1.0, **DRAWN},
    "top_p": {"top_p": 0.01, **DRAWN},
    "top_k": {"top_k": 1, **DRAWN},
    "min_p": {"min_p": 0.99, **DRAWN},
    "dry_multiplier": {"dry_multiplier": 50.0, "dry_allowed_length": 1},
    "dry_base": {"dry_base": 90.0, "dry_multiplier": 0.001, "logit_bias": {"100": 100.0}},
    "dry_allowed_length": {"dry_allowed_length": 1, "dry_multiplier": 50.0},
    "dry_penalty_last_n": {"dry_penalty_last_n": 0, "dry_multiplier": 50.0, "dry_allowed_length": 1},
    "dry_sequence_breakers": {
        "dry_sequence_breakers": ["a", "e", "o", " ", "t"],
        "dry_multiplier": 50.0,
        "dry_allowed_length": 1,
    },
    "frequency_penalty": 2.0,
    "presence_penalty": 2.0,
    "repetition_penalty": 2.0,
    "stop": " ",
    "stop_regex": "[a-z] ",
    "stop_token_ids": A,
    "ignore_eos": {"ignore_eos": True, "stop_token_ids": A},
    "n": 2,
    "seed": {"seed": 4, "temperature": 2.0},
    "logit_bias": {"logit_bias": {"100": 100.0}},
    "allowed_token_ids": [100],
    "bad_words": ["a"],
    "json_schema": {"json_schema": SCHEMA},
    "guided_json": {"guided_json": SCHEMA},
    "regex": "[0-9]+",
    "guided_regex": "[0-9]+",
    "ebnf": 'root ::= "z"+',
    "guided_grammar": 'root ::= "z"+',
    "grammar": 'root ::= "z"+',
    "structural_tag": {"structural_tag": {"type": "structural_tag", **TAG}},
    "choice": ["zz"],
    "guided_choice": ["zz"],
    "lark": 'start: "zz"',
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {"1": 100.0}},
    "no_stop_trim": {"no_stop_trim": True, "stop": " "},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": " "},
}
OPENAI: Fields = {
    "stream": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "structured_outputs": {"structured_outputs": {"regex": "[0-9]+"}},
    "truncate_prompt_tokens": 3,
    "cache_salt": "mine",
    "extra_key": "mine",
    "rid": "mine",
    "return_token_ids": True,
    "prompt_logprobs": 1,
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
CHAT: Fields = {
    **SAMPLING,
    **OPENAI,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": {"max_completion_tokens": 3, "max_tokens": None},
    "logprobs": True,
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": True},
    "tools": [TOOL],
    "tool_choice": {"tool_choice": "required", "tools": [TOOL]},
    "functions": [FUNCTION],
    "function_call": {"function_call": {"name": "f"}, "functions": [FUNCTION]},
    "chat_template_kwargs": {"chat_template_kwargs": THINK},
    "continue_final_message": {
        "continue_final_message": True,
        "messages": [*STORY, {"role": "assistant", "content": "The fox"}],
    },
    "reasoning": {"reasoning": {"enabled": True}},
    "reasoning_effort": "low",
    "separate_reasoning": {"separate_reasoning": False, **THINK},
    "stream_reasoning": {"stream_reasoning": False, "stream": True, **THINK},
    "include_reasoning": {"include_reasoning": False, **THINK},
    "max_thinking_tokens": {"max_thinking_tokens": 3, **THINK},
    "thinking_token_budget": {"thinking_token_budget": 3, **THINK},
    "thinking": {"thinking": {"type": "enabled"}},
    "enable_thinking": True,
    "add_generation_prompt": False,
}
COMPLETIONS: Fields = {
    **SAMPLING,
    **OPENAI,
    "prompt": "Hello",
    "echo": True,
    "logprobs": 2,
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": 1},
}
GENERATE: Fields = {
    "text": "Hello",
    "input_ids": {"input_ids": [5, 6], "text": None},
    "sampling_params": {"sampling_params": {"max_new_tokens": 3}},
    "rid": "mine",
    "stream": True,
    "incremental": {"incremental": True, "stream": True},
    "return_logprob": True,
    "logprob_start_len": {"logprob_start_len": 0, "return_logprob": True},
    "top_logprobs_num": {"top_logprobs_num": 2, "return_logprob": True},
    "token_ids_logprob": {"token_ids_logprob": [5], "return_logprob": True},
    "return_text_in_logprobs": {"return_text_in_logprobs": True, "return_logprob": True},
    "cache_salt": "mine",
    "extra_key": "mine",
}
SAMPLING_OF_RESPONSES = frozenset(sampling_names("chat").values()) - {"max_tokens", "n"}
RESPONSES: Fields = {
    **{name: case for name, case in SAMPLING.items() if name in SAMPLING_OF_RESPONSES},
    "input": "Hello",
    "instructions": "Be brief.",
    "stream": True,
    "store": False,
    "background": True,
    "max_output_tokens": 3,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
    "text": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": {
        "tool_choice": "required",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    },
    "parallel_tool_calls": False,
    "reasoning": {"reasoning": {"effort": "low"}},
    "truncation": "auto",
    "metadata": {"metadata": {"a": "b"}},
    "cache_salt": "mine",
    "extra_key": "mine",
    "max_tool_calls": 3,  # this field and the next two are only repeated in the answer
    "user": "mine",
    "safety_identifier": "mine",
    "prompt_cache_key": "mine",
}
CLAUDE_TOOL = {"name": "f", "input_schema": SCHEMA}
MESSAGES: Fields = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "system": "Be brief.",
    "stream": True,
    "temperature": 2.0,
    "top_p": {"top_p": 0.01, "temperature": 2.0},
    "top_k": {"top_k": 1, "temperature": 2.0},
    "stop_sequences": [" "],
    "tools": [CLAUDE_TOOL],
    "tool_choice": {"tool_choice": {"type": "any"}, "tools": [CLAUDE_TOOL]},
    "thinking": {"thinking": {"type": "adaptive"}},
    "output_config": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
OLLAMA: Fields = {
    "options": {"options": {"num_predict": 3}},
    "stream": True,
    "format": {"format": SCHEMA},
    "think": True,
    "logprobs": True,
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
}
OPTIONS: Fields = {
    "num_predict": 3,
    "temperature": {"temperature": 2.0, "seed": 3},
    "top_k": {"top_k": 1, **DRAWN},
    "top_p": {"top_p": 0.01, **DRAWN},
    "min_p": {"min_p": 0.99, **DRAWN},
    "typical_p": {"typical_p": 0.1, **DRAWN},
    "seed": {"seed": 4, "temperature": 2.0},
    "stop": " ",
    "repeat_penalty": 2.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
}


class Route(NamedTuple):
    """How to call a route, and the fields that need not change its answer, with the reason."""

    base: Fields
    cases: Fields
    fields: frozenset[str]
    refused: Fields = {}
    idle: Fields = {}
    inside: str = ""  # the fields are those of this object in the body


def declared(cls: type, sampling: Api | None = None) -> frozenset[str]:
    """Return the fields that a body may have. Fields that are always refused are tested separately."""
    names = {field.name for field in dataclasses.fields(cls) if field.init} - set(not_built(cls))
    if sampling is not None:
        names |= sampling_fields(sampling) - set(NOT_BUILT)
    return frozenset(names)


def not_built(cls: type) -> list[str]:
    hints = get_type_hints(cls, include_extras=True)
    return [field.name for field in dataclasses.fields(cls) if is_not_built(hints[field.name])]


GREEDY = {"temperature": 0, "max_tokens": 48, "model": MODEL}
# Functions that this server lacks; test_logits_processors.py has some.
PROCESSORS: Fields = {"custom_logit_processor": "mine", "custom_params": {"custom_params": {"a": 1}}}
# They need a prefill or decode server.
PREFILLED: Fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1}
# They need --enable-return-hidden-states and --enable-return-routed-experts; test_hidden_states.py and
# test_routed_experts.py ask for them.
PARTS: Fields = {"return_hidden_states": True, "return_routed_experts": True}
REFUSED_BY_OPENAI: Fields = {
    **PROCESSORS,
    **PARTS,
    "model": "other",
    "priority": 3,
    "best_of": 7,
    "lora_path": "none",
    **PREFILLED,
}
SPACES = "the demo model's tokenizer puts none between special tokens"
LOADING = (
    "numa",
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "low_vram",
    "f16_kv",
)
LOADING += ("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only")
FIRST = "first token of return_routed_experts"
NO_DRAFTS = "this server has no drafts"
ALONE = "test_determinism.py compares answers beside other requests"
PREFIX = "the demo model's tokenizer adds no tokens of its own"
ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(
        {**GREEDY, "messages": STORY},
        CHAT,
        declared(ChatBody, "chat"),
        refused={**REFUSED_BY_OPENAI, "modalities": ["audio"], "timeout_s": 0, "mm_processor_kwargs": {"fps": 1}},
        idle={
            "service_tier": "a test of its own in test_service.py",
            "prompt_cache_key": "a test of its own in test_service.py",
            "session_id": "a test of its own in test_service.py",
            "routed_experts_start_len": FIRST,
            "user": "reported to nobody",
            "spaces_between_special_tokens": SPACES,
            "add_special_tokens": PREFIX,
            "speculative": NO_DRAFTS,
            "deterministic": ALONE,
            "parallel_tool_calls": "the demo model makes one call",
        },
    ),
    "/v1/completions": Route(
        {**GREEDY, "prompt": PROMPT},
        COMPLETIONS,
        declared(CompletionBody, "completions"),
        refused={**REFUSED_BY_OPENAI, "suffix": "the end", "timeout_s": 0},
        idle={
            "service_tier": "a test of its own in test_service.py",
            "prompt_cache_key": "a test of its own in test_service.py",
            "session_id": "a test of its own in test_service.py",
            "routed_experts_start_len": FIRST,
            "user": "reported to nobody",
            "spaces_between_special_tokens": SPACES,
            "add_special_tokens": PREFIX,
            "speculative": NO_DRAFTS,
            "deterministic": ALONE,
        },
    ),
    "/generate": Route(
        {"text": PROMPT, "sampling_params": {"max_new_tokens": 48, "temperature": 0}},
        GENERATE,
        declared(GenerateBody),
        refused={
            **PREFILLED,
            **PARTS,
            "priority": 3,
            "lora_path": "none",
            "image_data": "aGk=",
            "video_data": "aGk=",
            "audio_data": "aGk=",
            "session_params": {"id": "none"},
            "timeout_s": 0,
        },
        idle={
            "service_tier": "a test of its own in test_service.py",
            "prompt_cache_key": "a test of its own in test_service.py",
            "session_id": "a test of its own in test_service.py",
            "routed_experts_start_len": FIRST,
            "custom_logit_processor": "asked in test_logits_processors.py",
            "log_metrics": "seen in /metrics",
            "modalities": "says what image_data has, as in SGLang",
        },
    ),
    "/generate of sampling_params": Route(
        {"text": PROMPT, "sampling_params": {"max_new_tokens": 48, "temperature": 0}},
        {
            **{p.name: SAMPLING[p.name] for p in parameters() if p.name in SAMPLING},
            "max_new_tokens": 3,
            "min_new_tokens": {"min_new_tokens": 20, "stop_token_ids": A},
            "sampling_seed": {"sampling_seed": 4, "temperature": 2.0},
        },
        sampling_fields("native") - set(NOT_BUILT),
        refused=PROCESSORS,
        idle={
            "spaces_between_special_tokens": SPACES,
            "stream_interval": "asked below",
            "speculative": NO_DRAFTS,
            "deterministic": ALONE,
        },
        inside="sampling_params",
    ),
    "/v1/responses": Route(
        {"input": STORY, "temperature": 0, "max_output_tokens": 48, "model": MODEL},
        RESPONSES,
        declared(ResponsesBody) | SAMPLING_OF_RESPONSES,
        refused={
            **PROCESSORS,
            "model": "other",
            "priority": 3,
            "previous_response_id": "resp_none",
            "timeout_s": 0,
            "stream_options": {"include_obfuscation": True},
        },
        idle={
            "spaces_between_special_tokens": SPACES,
            "service_tier": "a test of its own in test_service.py",
            "prompt_cache_retention": "every prefix is cached",
            "client_metadata": "reported to nobody",
            "speculative": NO_DRAFTS,
            "deterministic": ALONE,
        },
    ),
    "/v1/messages": Route(
        {"messages": STORY, "temperature": 0, "max_tokens": 48, "model": MODEL},
        MESSAGES,
        declared(MessagesBody),
        refused={"model": "other", "service_tier": "flex", "speed": "fast"},
        idle={
            "metadata": "reported to nobody",
            "cache_control": "a test of its own in test_service.py",
            "context_management": "of its edits the one that changes nothing is understood",
        },
    ),
    "/api/chat": Route(
        {
            "messages": STORY,
            "model": MODEL,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 48},
        },
        {**OLLAMA, "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]},
        declared(ollama.ChatBody),
        refused={"model": "other"},
        idle={"keep_alive": "the model stays loaded"},
    ),
    "/api/generate": Route(
        {
            "prompt": "A fox.",
            "model": MODEL,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 48},
        },
        {**OLLAMA, "prompt": "Hello", "system": "Be brief.", "raw": True},
        declared(ollama.GenerateBody),
        refused={"model": "other", "images": ["aGk="]},
        idle={"keep_alive": "the model stays loaded"},
    ),
    "/api/chat of options": Route(
        {
            "messages": STORY,
            "model": MODEL,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 48},
        },
        OPTIONS,
        declared(ollama.Options),
        refused={"tfs_z": 0.5, "mirostat": 1},
        idle={
            "mirostat_tau": "of mirostat",
            "mirostat_eta": "of mirostat",
            "repeat_last_n": "refused beside repeat_penalty",
            "penalize_newline": "refused beside repeat_penalty",
            **dict.fromkeys(LOADING, "says how a model is loaded"),
        },
        inside="options",
    ),
}
NOT_BUILT_OF: Mapping[str, type] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/api/chat": ollama.ChatBody,
    "/api/generate": ollama.GenerateBody,
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        serving("--enable-cache-report", "--enable-metrics", "--cpu-threads", "1") as server,
        httpx.Client(base_url=server.url, timeout=60) as made,
    ):
        yield made


def comparable(value: Any) -> Any:
    """Return the answer without times and without new ids."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in OF_THE_MOMENT}
        return {
            name: comparable(item)
            for name, item in kept.items()
            if not (name in IDS and isinstance(item, str) and item != "mine")
        }
    return [comparable(item) for item in value] if isinstance(value, list) else value


def ask(client: httpx.Client, path: str, body: Fields) -> tuple[int, Any]:
    answer = client.post(path, json=body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    found = [comparable(json.loads(line)) for line in lines if line.startswith(("{", "[{"))]
    return answer.status_code, found


@pytest.mark.parametrize("name", ROUTES)
def test_every_field_does_something_or_is_refused(client: httpx.Client, name: str) -> None:
    route, path = ROUTES[name], name.partition(" ")[0]

    def asked(fields: Fields) -> tuple[int, Any]:
        if not route.inside:
            return ask(client, path, {**route.base, **fields})
        return ask(client, path, {**route.base, route.inside: {**route.base[route.inside], **fields}})

    assert route.fields == route.cases.keys() | route.refused.keys() | route.idle.keys()
    asked({})  # caches its prompt
    idle = []
    for field, value in route.cases.items():
        case = value if isinstance(value, dict) and field in value else {field: value}
        if field in ("cache_salt", "extra_key"):
            case = {field: name}  # a name that no other route has used
        status, found = asked(case)
        assert status == 200, (field, found)
        if found == asked({other: each for other, each in case.items() if other != field})[1]:
            idle.append(field)
    assert idle == []
    for field, value in route.refused.items():
        status, found = asked({field: value})
        assert 400 <= status < 500, (field, found)
        assert field in json.dumps(found)


@pytest.mark.parametrize("path", NOT_BUILT_OF)
def test_what_is_not_supported_is_refused_by_its_name(client: httpx.Client, path: str) -> None:
    samplers = NOT_BUILT if path in APIS.values() and path != "/generate" else ()
    for name in samplers:
        assert ask(client, path, {**ROUTES[path].base, name: 0})[0] == 200, name
    for field in (*not_built(NOT_BUILT_OF[path]), *samplers):
        status, found = ask(client, path, {**ROUTES[path].base, field: {"a": 1}})
        assert status == 400, field
        assert f"{field} is not supported yet" in json.dumps(found)


def test_stream_interval_makes_events_of_several_tokens(client: httpx.Client) -> None:
    sampling = {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True}
    each = ask(client, "/generate", {"text": PROMPT, "stream": True, "sampling_params": sampling})[1]
    some = ask(
        client,
        "/generate",
        {"text": PROMPT, "stream": True, "sampling_params": {**sampling, "stream_interval": 12}},
    )[1]
    assert len(some) < len(each)
    assert some[-1]["text"] == each[-1]["text"]


def test_a_request_can_be_left_out_of_the_metrics(client: httpx.Client) -> None:
    def num_counted() -> float:
        text = client.get("/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith("sglang:num_requests_total")]
        return float(line.rpartition(" ")[2])

    before = num_counted()
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    assert ask(client, "/generate", {**body, "log_metrics": False})[0] == 200
    assert client.get("/health_generate").status_code == 200
    assert num_counted() == before
    assert ask(client, "/generate", body)[0] == 200
    assert num_counted() == before + 1
