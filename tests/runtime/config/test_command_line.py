"""Flags and values as words."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Args, options
from runtime.config.other_names import OTHER_NAMES
from runtime.errors import ConfigurationError


def refusals(*words: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        Args.parse(words)
    return list(caught.value.refusals)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--tp", "2"], "tp_size", 2),
        (["--dp", "2"], "dp_size", 2),
        (["--pp", "2"], "pp_size", 2),
        (["--ep", "2"], "ep_size", 2),
        (["--mem-frac", "0.5"], "mem_fraction_static", 0.5),
        (["--speculative-algo", "EAGLE"], "speculative_algorithm", "EAGLE"),
        (["--log-requests"], "log_requests", True),
        (["--page_size=4"], "page_size", 4),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--hybrid-kvcache-ratio"], "hybrid_kvcache_ratio", 0.5),
        (["--hybrid-kvcache-ratio", "0.25"], "hybrid_kvcache_ratio", 0.25),
        (["--prefill-only-one-req", "true"], "prefill_only_one_req", True),
        (["--no-enable-mixed-chunk"], "enable_mixed_chunk", False),
        (["--quantization-param-path", "None"], "quantization_param_path", None),
        (["--api-key", "None"], "api_key", "None"),
        (["--cuda-graph-bs", "1", "2"], "cuda_graph_bs", (1, 2)),
        (["--cuda-graph-bs", "[1, 2]"], "cuda_graph_bs", (1, 2)),
        (["--lora-paths"], "lora_paths", ()),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--json-model-override-args", '{"a": 1}'], "json_model_override_args", {"a": 1}),
        (["--served-model-name=--odd"], "served_model_name", "--odd"),
    ],
)
def test_words_are_read(words: list[str], name: str, value: object) -> None:
    assert Args.parse(words).get(name) == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--page-sze", "16"], "--page-sze is not an option; did you mean --page-size?"),
        (["--tpp", "2"], "--tpp is not an option; did you mean --tp-size?"),
        (["--zzz"], "--zzz is not an option."),
        (["--port"], "--port needs a value: a whole number."),
        (["--port", "1", "2"], "--port takes one value, not 2."),
        (["--port", "70000"], "--port must be at most 65535, not 70000."),
        (["--port", "1e3"], "--port must be a whole number, not '1e3'."),
        (["--page-size", "0"], "--page-size must be at least 1, not 0."),
        (["--mem-fraction-static", "0"], "--mem-fraction-static must be more than 0, not 0.0."),
        (["--watchdog-timeout", "nan"], "--watchdog-timeout must be a finite number, not nan."),
        (["--tokenizer-mode", "quick"], "--tokenizer-mode must be one of auto, slow, not 'quick'."),
        (["--json-model-override-args", "{"], "--json-model-override-args is not valid JSON: {"),
        (["--json-model-override-args", "[]"], "--json-model-override-args must be a JSON object, not '[]'."),
        (["--cuda-graph-bs"], "--cuda-graph-bs needs at least one value."),
        (["--disable-radix-cache", "maybe"], "--disable-radix-cache must be true or false, not 'maybe'."),
        (["--no-enable-mixed-chunk", "x"], "--no-enable-mixed-chunk takes no value."),
        (["--no-port"], "--no-port is not an option; did you mean"),
        (["model"], "unknown command 'model'; did you mean models?"),
        (["-p", "80"], "-p is the beginning of several options: "),
    ],
)
def test_mistake_is_explained(words: list[str], sentence: str) -> None:
    assert refusals(*words)[0].startswith(sentence)


def test_all_mistakes_are_said_at_once() -> None:
    said = refusals("--port", "x", "--page-sze", "1", "--dtype", "int3", "--page-size", "16")
    assert len(said) == 3
    assert ["--port" in said[0], "--page-sze" in said[1], "--dtype" in said[2]] == [True] * 3


def test_secret_is_not_repeated_in_a_message() -> None:
    said = refusals("--api-key", "hush", "hush", "--api-kye", "hush", "--api-kye=hush")
    assert len(said) == 3
    assert "hush" not in "".join(said)


values = ("1", "-1", "0.5", "[]", "{}", "x", "", "-", "--")
pieces = st.sampled_from([*(option.flag for option in options()), *values])


@given(st.lists(pieces))
def test_no_command_line_raises_anything_but_refusals(words: list[str]) -> None:
    args = None
    with suppress(ConfigurationError):
        args = Args.parse(words)
    assert args is None or args.explicitly_set <= {option.name for option in options()}


FLAGS = {flag for option in options() for flag in (*option.flags, option.negated_flag)}
ANY_FLAG = re.compile(r"--[a-z-]+[a-z]")


def test_options_of_other_servers_are_refused_with_what_to_use_here() -> None:
    words = "serve org/model --max-model-len 8192 --enable-prefix-caching --reasoning-parser deepseek_r1"
    command, model, length, prefixes, parser = refusals(*words.split())
    assert command.endswith("leave it out.")
    assert model.endswith("--model-path org/model.")
    assert length.endswith("use --context-length.")
    assert "leave it out: prefixes are cached" in prefixes
    assert parser.endswith("did you mean deepseek-r1?")


@pytest.mark.parametrize("flag", OTHER_NAMES)
def test_what_is_said_about_options_of_other_servers_is_true(flag: str) -> None:
    [said] = refusals(flag)
    assert said.startswith(f"{flag} is not an option;")
    assert set(ANY_FLAG.findall(said)) - {flag} <= FLAGS


def test_the_migration_page_says_of_vllms_options_what_their_refusal_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|$", page.partition("## Coming from vLLM")[2], re.MULTILINE)
    assert len(rows) > 15
    for theirs, ours in rows:
        for flag in set(ANY_FLAG.findall(theirs)) - FLAGS:
            assert OTHER_NAMES[flag].split()[0] in ours or "leave it out" in OTHER_NAMES[flag], flag
