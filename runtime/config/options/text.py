"""Options about text: tokenizer, chat template, parsers of the output, grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, inert, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArgs:
    """Text."""

    tokenizer_path: Annotated[
        str | None,
        OptionSpec(
            "Folder or Hub repository with the tokenizer. Default: the value of --model-path.",
            plan="text.tokenizer_path",
        ),
    ] = None
    tokenizer_mode: Annotated[
        str,
        OptionSpec(
            "auto: the fast tokenizer if there is one; slow: the plain Python one.",
            choices=("auto", "slow"),
            plan="text.mode",
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool,
        OptionSpec(
            "Load no tokenizer: requests bring token ids and get token ids. Chat and stop strings need text."
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        OptionSpec(
            "Jinja file (.jinja) that turns messages into a prompt. Default: the template that comes with "
            "the tokenizer.",
            plan="text.chat_template",
        ),
    ] = None
    grammar_backend: Annotated[
        str | None,
        OptionSpec(
            "What enforces JSON schemas, regular expressions and grammars on the output. none: requests "
            "that ask for it are answered with status 400. Default: none.",
            choices=("xgrammar", "outlines", "llguidance", "none"),
            built=("none",),
        ),
    ] = None
    tokenizer_worker_num: Annotated[
        int, planned("Number of tokenizer workers. One thread tokenizes for all by default.", low=1)
    ] = 1
    completion_template: Annotated[
        str | None,
        planned(
            "Template of fill-in-the-middle prompts, used when /v1/completions gets a suffix: "
            "deepseek_coder, star_coder, qwen_coder, or a JSON file.",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        planned(
            "Which family's marks separate reasoning from the answer in chat output.",
            choices=(
                "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "kimi", "qwen3", "qwen3-thinking", "step3",
            ),
        ),
    ] = None  # fmt: skip
    tool_call_parser: Annotated[
        str | None,
        planned(
            "Which family's format of tool calls is recognised in chat output.",
            choices=(
                "llama3", "qwen25", "mistral", "deepseekv3", "deepseekv31", "pythonic", "kimi_k2",
                "qwen3_coder", "glm45", "step3", "gpt-oss",
            ),
        ),
    ] = None  # fmt: skip
    enable_tokenizer_batch_encode: Annotated[
        bool, planned("Tokenize the prompts of one request list in a single call.")
    ] = False
    enable_dynamic_batch_tokenizer: Annotated[
        bool, planned("Tokenize requests that arrive together in a single call.")
    ] = False
    dynamic_batch_tokenizer_batch_size: Annotated[
        int, planned("Most prompts in one such tokenizer call.", low=1)
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float, planned("Longest wait in seconds for more prompts before such a call starts.", low=0)
    ] = 0.002
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        planned("Regular expression for the white space allowed between the parts of constrained JSON."),
    ] = None
    disable_outlines_disk_cache: Annotated[
        bool, planned("Keep compiled outlines grammars in memory only.")
    ] = False
    disable_jump_forward: Annotated[
        bool,
        inert(
            "Sample also those tokens that a grammar leaves no choice about.",
            because="skipping such tokens was already gone where the option comes from",
        ),
    ] = False
    disable_fast_image_processor: Annotated[
        bool, planned("Prepare images with the slower processor of transformers.")
    ] = False
