"""The tokenizer's and the server's sections of the plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ops.machine import Machine
from runtime.config.chat_templates import RESERVED_KWARGS, MiddleTemplate, chat_template_named, middle_template
from runtime.config.gguf_header import is_gguf, read_header
from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, Signs, guess
from runtime.config.plan import ServePlan, TokenizerPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder
from runtime.config.template_files import read_json, read_templates
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.grammar_spec import InvalidGrammar, check_whitespace
from runtime.sampling_params import SamplingParams

MIN_ENCODER_THREADS = 2
# Grammar backend -> package that must be installed.
GRAMMAR_PACKAGES = {
    "xgrammar": "xgrammar",
    "outlines": "outlines-core",
}
DEMO_NAME = "penstock-demo"


def text_plan(builder: PlanBuilder, machine: Machine, model_path: str) -> TokenizerPlan:
    """Plan the tokenizer. Guess the formats of reasoning and tool calls from the chat template."""
    args = builder.args.text
    try:
        if args.chat_template is not None:
            chat_template_named(args.chat_template)
    except ConfigurationError as error:
        builder.refuse("chat_template", str(error))
    template = _template(builder, model_path)
    return builder.build(
        TokenizerPlan,
        tokenizer_path=_tokenizer_path(builder, model_path),
        tool_call_parser=_parser(builder, "tool_call_parser", TOOL_CALL_PARSERS, template),
        reasoning_parser=_parser(builder, "reasoning_parser", REASONING_PARSERS, template),
        grammar_backend=_grammar_backend(builder, machine),
        json_whitespace=_json_whitespace(builder),
        middle=_middle(builder),
        encoder_threads=_encoder_threads(builder),
    )


def _middle(builder: PlanBuilder) -> Decision[MiddleTemplate | None]:
    name, choice = "completion_template", builder.args.text.completion_template
    try:
        return builder.follow(name, None if choice is None else middle_template(choice))
    except ConfigurationError as error:
        builder.refuse(name, str(error))
        return Decision(None, "the requested value cannot be used")


def _encoder_threads(builder: PlanBuilder) -> Decision[int]:
    asked = builder.args.text.tokenizer_worker_num
    if asked < MIN_ENCODER_THREADS:
        return Decision(MIN_ENCODER_THREADS, "one long text must not block all other texts")
    return builder.follow("tokenizer_worker_num")


def _parser(builder: PlanBuilder, option: str, parsers: Mapping[str, Signs], template: str) -> Decision[str | None]:
    """Return the parser that the option names, or the parser guessed from the chat template."""
    asked = builder.args.get(option)
    if asked is not None:
        return Decision(None if asked == "none" else asked, "as asked")
    if not template:
        return Decision(None, "there is no chat template to guess from")
    guessed = guess(parsers, template)
    if guessed is None:
        return Decision(None, "the chat template contains no known format")
    return Decision(guessed[0], f"guessed: the chat template has {guessed[1]}")


def _template(builder: PlanBuilder, model_path: str) -> str:
    """Return the text of all chat templates, or "" if there are none or they cannot be read."""
    args = builder.args.text
    if args.skip_tokenizer_init:
        return ""
    folder = Path(args.tokenizer_path or model_path)
    try:
        if args.chat_template is not None:
            return chat_template_named(args.chat_template) or Path(args.chat_template).read_text("utf-8")
        if is_gguf(folder):
            return str(read_header(folder).values.get("tokenizer.chat_template", ""))
        if not model_path or not folder.is_dir():
            return ""
        return "\n".join(read_templates(folder, read_json(folder / "tokenizer_config.json")).values())
    except (OSError, ValueError, LookupError, TypeError, ConfigurationError):
        return ""  # the tokenizer reports the error when it loads


def _grammar_backend(builder: PlanBuilder, machine: Machine) -> Decision[str]:
    asked = builder.args.text.grammar_backend
    if builder.args.text.skip_tokenizer_init:
        if asked not in (None, "none"):
            builder.refuse(
                "grammar_backend",
                f"--grammar-backend {asked} needs a tokenizer; leave --skip-tokenizer-init out.",
            )
        return Decision("none", "there is no tokenizer")
    package = GRAMMAR_PACKAGES.get(asked or "")
    if package is not None and package not in machine.packages:
        builder.refuse(
            "grammar_backend",
            f"--grammar-backend {asked} needs its package: pip install 'penstock[{asked}]'.",
        )
    return builder.follow_or("grammar_backend", "llguidance", "the default")


def _json_whitespace(builder: PlanBuilder) -> Decision[str | None]:
    name = "constrained_json_whitespace_pattern"
    pattern = builder.args.text.constrained_json_whitespace_pattern
    try:
        if pattern is not None:
            check_whitespace(pattern)
    except InvalidGrammar as error:
        builder.refuse(name, f"--constrained-json-whitespace-pattern: {error}.")
    return builder.follow(name)


def _tokenizer_path(builder: PlanBuilder, model_path: str) -> Decision[str | None]:
    if builder.args.text.skip_tokenizer_init:
        if builder.args.text.tokenizer_path is not None:
            builder.refuse("tokenizer_path", "--tokenizer-path and --skip-tokenizer-init exclude each other.")
        return Decision(None, "as asked: requests send and receive token ids")
    return builder.follow_or("tokenizer_path", model_path, "the model's folder")


def serve_plan(builder: PlanBuilder, model_path: str, demo_path: str | None) -> ServePlan:
    """Plan the server. `demo_path` is the folder of the demo model, or None."""
    args = builder.args.http
    if args.api_key is not None and not args.api_key.strip():
        builder.refuse("api_key", "--api-key is empty; leave it out to require no key.")
    if args.admin_api_key is not None and not args.admin_api_key.strip():
        builder.refuse("admin_api_key", "--admin-api-key is empty; leave it out for no admin key.")
    elif args.admin_api_key is not None and args.admin_api_key == args.api_key:
        builder.refuse(
            "admin_api_key", "--admin-api-key equals --api-key, so every user would be an admin; use different keys."
        )
    if args.public_origin is not None and not re.fullmatch(r"https?://[^/?#@\s]+", args.public_origin):
        builder.refuse("public_origin", "--public-origin must be an origin, for example https://models.example.")
    _check_hidden_states(builder)
    return builder.build(
        ServePlan,
        served_model_name=_served_model_name(builder, model_path, demo_path),
        log_level_http=builder.follow_or("log_level_http", builder.args.observe.log_level, "the value of --log-level"),
        preferred_sampling=_preferred_sampling(builder),
        model_sampling=_model_sampling(builder),
        template_kwargs=_template_kwargs(builder),
    )


def _check_hidden_states(builder: PlanBuilder) -> None:
    option, parallel, why = "enable_return_hidden_states", builder.args.parallel, None
    if parallel.pp_size > 1:
        why = "the last stage of a pipeline sends only the states that are sampled; use --pp-size 1"
    elif parallel.enable_dp_attention:
        why = "rank 0 has only the states of its own attention group; leave --enable-dp-attention out"
    if builder.args.get(option) and why is not None:
        builder.refuse(option, f"--enable-return-hidden-states: {why}.")


def _served_model_name(builder: PlanBuilder, model_path: str, demo_path: str | None) -> Decision[str]:
    if builder.args.model.model_path is None and demo_path is not None:
        return builder.follow_or("served_model_name", DEMO_NAME, "the demo model's name")
    return builder.follow_or("served_model_name", model_path, "the model's path")


def _model_sampling(builder: PlanBuilder) -> Decision[bool]:
    asked = builder.follow("sampling_defaults")
    return asked._replace(value=asked.value == "model")


def _template_kwargs(builder: PlanBuilder) -> Decision[Mapping[str, Any]]:
    name = "default_chat_template_kwargs"
    if reserved := sorted(RESERVED_KWARGS & builder.args.text.default_chat_template_kwargs.keys()):
        builder.refuse(name, f"--default-chat-template-kwargs cannot set {', '.join(reserved)}; requests set them.")
    return builder.follow(name)


def _preferred_sampling(builder: PlanBuilder) -> Decision[Mapping[str, Any]]:
    preferred = builder.args.sampling.preferred_sampling_params or {}
    name = "preferred_sampling_params"
    known = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(preferred.keys() - known):
        builder.refuse(name, f"--preferred-sampling-params: unknown sampling parameters {', '.join(unknown)}.")
        return Decision({}, "the requested value cannot be used")
    try:
        SamplingParams(**preferred)
    except InvalidRequest as error:
        builder.refuse(name, f"--preferred-sampling-params: {error.message}")
    except (TypeError, AttributeError):
        builder.refuse(name, "--preferred-sampling-params: a value has the wrong type.")
    return builder.follow(name, preferred)
