"""Options about text: tokenizer, chat template, parsers of the output, grammars."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.chat_templates import CHAT_TEMPLATES
from runtime.config.option_spec import inert, option, planned
from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from runtime.config.plan import SchedulerPlan, TokenizerPlan

NO_TOKENIZER_BATCHES = (
    "each prompt is tokenized by itself, beside the running steps; the token ids are the same"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArgs:
    """Text."""

    tokenizer_path: str | None = option(
        None,
        "Folder or Hub repository with the tokenizer. Default: the value of --model-path.",
        plan=TokenizerPlan.tokenizer_path,
    )
    tokenizer_mode: str = option(
        "auto",
        "auto: the fast tokenizer if there is one; slow: the plain Python one.",
        choices=("auto", "slow"),
        plan=TokenizerPlan.mode,
    )
    skip_tokenizer_init: bool = option(
        False,
        "Load no tokenizer: requests bring token ids and get token ids. Chat and stop strings need text.",
    )
    chat_template: str | None = option(
        None,
        "What turns messages into a prompt: a jinja file (.jinja), or one of ours by name: "
        f"{', '.join(CHAT_TEMPLATES)}. Default: the template that comes with the tokenizer.",
        plan=TokenizerPlan.chat_template,
    )
    grammar_backend: str | None = option(
        None,
        "What enforces JSON schemas, regular expressions and grammars on the output. xgrammar and outlines come "
        "with extras of these names, and leave what they do not enforce exactly to llguidance. none: requests "
        "that ask for it are answered with status 400. Default: llguidance.",
        choices=("xgrammar", "outlines", "llguidance", "none"),
        sglang="xgrammar",
        plan=TokenizerPlan.grammar_backend,
    )
    tokenizer_worker_num: int = option(
        1,
        "Threads that tokenize long texts, two at least; they hold no lock of Python's.",
        low=1,
        high=64,
        plan=TokenizerPlan.encoder_threads,
    )
    completion_template: str | None = option(
        None,
        "Template of fill-in-the-middle prompts, used when /v1/completions gets a suffix: deepseek_coder, "
        "star_coder, qwen_coder, or a JSON file with fim_begin_token, fim_middle_token, fim_end_token and "
        "fim_position (MIDDLE or END). Default: the one whose marks are tokens of the model.",
        plan=TokenizerPlan.middle,
    )
    reasoning_parser: str | None = option(
        None,
        "Which family's marks separate reasoning from the answer in chat output; none: no marks do. Default: "
        "guessed from the chat template.",
        choices=("none", *sorted(REASONING_PARSERS)),
        plan=TokenizerPlan.reasoning_parser,
    )
    tool_call_parser: str | None = option(
        None,
        "Which family's format of tool calls is recognised in chat output; none: requests with tools are "
        "refused. Default: guessed from the chat template.",
        choices=("none", *sorted(TOOL_CALL_PARSERS)),
        plan=TokenizerPlan.tool_call_parser,
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
        32, "Most prompts in one such tokenizer call.", reason=NO_TOKENIZER_BATCHES, low=1
    )
    dynamic_batch_tokenizer_batch_timeout: float = inert(
        0.002,
        "Longest wait in seconds for more prompts before such a call starts.",
        reason=NO_TOKENIZER_BATCHES,
        low=0,
    )
    constrained_json_whitespace_pattern: str | None = option(
        None,
        "Regular expression, made of blanks, for the white space allowed between the parts of constrained JSON. "
        "Default: a space, or a new line with an indentation of up to 40 characters.",
        plan=TokenizerPlan.json_whitespace,
    )
    disable_outlines_disk_cache: bool = option(
        False,
        "Keep the automata of --grammar-backend outlines in memory only, not in ~/.cache/penstock/automata too.",
        plan=TokenizerPlan.memory_only_automata,
    )
    disable_jump_forward: bool = option(
        False,
        "Sample also those tokens that a grammar leaves no choice about, one by one. Slower; useful to find mistakes.",
        plan=SchedulerPlan.max_forced,
        says="the opposite",
    )
    disable_fast_image_processor: bool = planned(
        False, "Prepare images with the slower processor of transformers."
    )
