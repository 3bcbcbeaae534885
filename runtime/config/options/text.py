"""Options about text: tokenizer, chat template, output parsers and grammars."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.chat_templates import CHAT_TEMPLATES
from runtime.config.option_spec import Json, inert, option
from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS

NO_TOKENIZER_BATCHES = "each prompt is tokenized separately, while steps run; the token ids are the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArgs:
    """Text."""

    tokenizer_path: str | None = option(
        None,
        "Folder or Hub repository with the tokenizer. Default: the value of --model-path.",
        plan="tokenizer.tokenizer_path",
    )
    tokenizer_mode: str = option(
        "auto",
        "auto: read tokenizer.json directly if there is one; slow: load the tokenizer with transformers, which takes "
        "its plain Python one only where it has no fast one.",
        choices=("auto", "slow"),
        plan="tokenizer.mode",
    )
    skip_tokenizer_init: bool = option(
        False,
        "Load no tokenizer: requests send and receive token ids. Chat and stop strings are then not available.",
    )
    chat_template: str | None = option(
        None,
        "Template that converts messages to a prompt: a jinja file (.jinja) or a built-in template: "
        f"{', '.join(CHAT_TEMPLATES)}. Default: the tokenizer's template.",
        plan="tokenizer.chat_template",
    )
    default_chat_template_kwargs: Json = option(
        {},
        'JSON object of variables for the chat template, such as {"enable_thinking": false}. Variables that a request '
        "sets override them. Default: none.",
        plan="serve.template_kwargs",
    )
    grammar_backend: str | None = option(
        None,
        "Library that enforces JSON schemas, regular expressions and grammars. xgrammar and outlines need the extras "
        "of the same names; constraints that they cannot enforce exactly are handled by llguidance. none: constrained "
        "requests are answered with status 400. Default: llguidance.",
        choices=("xgrammar", "outlines", "llguidance", "none"),
        sglang="xgrammar",
        plan="tokenizer.grammar_backend",
    )
    tokenizer_worker_num: int = option(
        1,
        "Number of threads that tokenize long texts, at least 2. They run without Python's global interpreter lock.",
        low=1,
        high=64,
        plan="tokenizer.encoder_threads",
    )
    completion_template: str | None = option(
        None,
        "Template of fill-in-the-middle prompts, for /v1/completions with a suffix: deepseek_coder, star_coder, "
        "qwen_coder, or a JSON file with fim_begin_token, fim_middle_token, fim_end_token and fim_position (MIDDLE or "
        "END). Default: the built-in template whose markers are tokens of the model.",
        plan="tokenizer.middle",
    )
    reasoning_parser: str | None = option(
        None,
        "Format that separates reasoning from the answer in chat output; none: do not separate them. Default: guessed "
        "from the chat template.",
        choices=("none", *sorted(REASONING_PARSERS)),
        plan="tokenizer.reasoning_parser",
    )
    tool_call_parser: str | None = option(
        None,
        "Format of tool calls in chat output; none: requests with tools are refused. Default: guessed from the chat "
        "template.",
        choices=("none", *sorted(TOOL_CALL_PARSERS)),
        plan="tokenizer.tool_call_parser",
    )
    enable_tokenizer_batch_encode: bool = inert(
        False,
        "Tokenize the prompts of one request list in a single call.",
        reason=NO_TOKENIZER_BATCHES,
    )
    enable_dynamic_batch_tokenizer: bool = inert(
        False, "Tokenize requests that arrive together in a single call.", reason=NO_TOKENIZER_BATCHES
    )
    dynamic_batch_tokenizer_batch_size: int = inert(
        32, "Maximum number of prompts in one tokenizer call.", reason=NO_TOKENIZER_BATCHES, low=1
    )
    dynamic_batch_tokenizer_batch_timeout: float = inert(
        0.002,
        "Longest wait in seconds for further prompts before a tokenizer call starts.",
        reason=NO_TOKENIZER_BATCHES,
        low=0,
    )
    constrained_json_whitespace_pattern: str | None = option(
        None,
        "Regular expression for the whitespace between the tokens of constrained JSON. It must match only whitespace. "
        "Default: a space, or a line break with an indentation of up to 40 characters.",
        plan="tokenizer.json_whitespace",
    )
    disable_outlines_disk_cache: bool = option(
        False,
        "Keep the automata of --grammar-backend outlines in memory only. By default they are also stored in "
        "~/.cache/penstock/automata.",
        plan="tokenizer.memory_only_automata",
    )
    disable_jump_forward: bool = option(
        False,
        "Sample every token, including tokens that the grammar forces. Slower, but useful for debugging.",
        plan="scheduler.max_forced",
        zero_is_off=True,
        invert=True,
    )
