"""The sections of the plan about text and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ops.machine import Machine
from runtime.config.chat_templates import MiddleTemplate, chat_template_named, middle_template
from runtime.config.gguf_header import is_gguf, read_header
from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, Signs, guess
from runtime.config.plan import ServePlan, TokenizerPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder, build
from runtime.config.template_files import read_json, read_templates
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.grammar_spec import InvalidGrammar, check_whitespace
from runtime.sampling_params import SamplingParams

MIN_ENCODER_THREADS = 2
GRAMMAR_PACKAGES = {"xgrammar": "xgrammar", "outlines": "outlines-core"}  # by backend, which are extras
DEMO_NAME = "penstock-demo"


def text_plan(builder: PlanBuilder, machine: Machine, model_path: str) -> TokenizerPlan:
    """Reads the checkpoint's chat template, from which the formats of thoughts and calls follow."""
    args = builder.args.text
    try:
        if args.chat_template is not None:
            chat_template_named(args.chat_template)
    except ConfigurationError as error:
        builder.refuse("chat_template", str(error))
    template = _template(builder, model_path)
    return build(
        TokenizerPlan,
        tokenizer_path=_tokenizer_path(builder, model_path),
        mode=builder.follow("tokenizer_mode"),
        trust_remote_code=builder.follow("trust_remote_code"),
        revision=builder.follow("revision"),
        chat_template=builder.follow("chat_template"),
        tool_call_parser=_parser(builder, "tool_call_parser", TOOL_CALL_PARSERS, template),
        reasoning_parser=_parser(builder, "reasoning_parser", REASONING_PARSERS, template),
        grammar_backend=_grammar_backend(builder, machine),
        memory_only_automata=builder.follow("disable_outlines_disk_cache"),
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
        return Decision(None, "what was asked for cannot be used")


def _encoder_threads(builder: PlanBuilder) -> Decision[int]:
    asked = builder.args.text.tokenizer_worker_num
    if asked < MIN_ENCODER_THREADS:
        return Decision(MIN_ENCODER_THREADS, "one long text must not hold up all others")
    return builder.follow("tokenizer_worker_num")


def _parser(
    builder: PlanBuilder, option: str, parsers: Mapping[str, Signs], template: str
) -> Decision[str | None]:
    """A format of the output: as asked, or as the chat template gives it away."""
    asked = builder.args.get(option)
    if asked is not None:
        return Decision(None if asked == "none" else asked, "as asked")
    if not template:
        return Decision(None, "there is no chat template to guess it from")
    guessed = guess(parsers, template)
    if guessed is None:
        return Decision(None, "the chat template shows no format that is known")
    return Decision(guessed[0], f"guessed: the chat template has {guessed[1]}")


def _template(builder: PlanBuilder, model_path: str) -> str:
    """All that the chat templates say; empty where there are none, or none that can be read now."""
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
    except (OSError, ValueError, LookupError, TypeError, ConfigurationError):  # loading it says what is wrong
        return ""


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
    return Decision(asked, "as asked") if asked is not None else Decision("llguidance", "the default")


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
        return Decision(None, "as asked: token ids in, token ids out")
    if builder.args.text.tokenizer_path is not None:
        return Decision(builder.args.text.tokenizer_path, "as asked")
    return Decision(model_path, "the model's folder")


def serve_plan(builder: PlanBuilder, model_path: str, demo_path: str | None) -> ServePlan:
    """`demo_path` is where the demo model lies, which has a name of its own; None: there is none."""
    args = builder.args.http
    if args.api_key is not None and not args.api_key.strip():
        builder.refuse("api_key", "--api-key is empty; leave it out to ask for no key.")
    if args.admin_api_key is not None and not args.admin_api_key.strip():
        builder.refuse("admin_api_key", "--admin-api-key is empty; leave it out to have none.")
    elif args.admin_api_key is not None and args.admin_api_key == args.api_key:
        builder.refuse("admin_api_key", "--admin-api-key is the same as --api-key; users would be admins.")
    return build(
        ServePlan,
        host=builder.follow("host"),
        port=builder.follow("port"),
        api_key=builder.follow("api_key"),
        served_model_name=_served_model_name(builder, model_path, demo_path),
        log_level=builder.follow("log_level"),
        log_level_http=_log_level_http(builder),
        log_json=builder.follow("log_json"),
        skip_warmup=builder.follow("skip_server_warmup"),
        input_file=builder.follow("debug_tensor_dump_input_file"),
        cache_report=builder.follow("enable_cache_report"),
        preferred_sampling=_preferred_sampling(builder),
        file_storage=builder.follow("file_storage_path"),
        allow_auto_truncate=builder.follow("allow_auto_truncate"),
        weight_version=builder.follow("weight_version"),
        chat_page=builder.follow("disable_chat_page", not args.disable_chat_page),
        admin_api_key=builder.follow("admin_api_key"),
        api_key_file=builder.follow("api_key_file"),
        cors_allow_origins=builder.follow("cors_allow_origins"),
        shutdown_timeout_s=builder.follow("shutdown_timeout"),
        ssl_certfile=builder.follow("ssl_certfile"),
        ssl_keyfile=builder.follow("ssl_keyfile"),
        ssl_keyfile_password=builder.follow("ssl_keyfile_password"),
        ssl_ca_certs=builder.follow("ssl_ca_certs"),
        max_open_calls=builder.follow("max_open_calls_per_client"),
        max_body_bytes=builder.follow("max_body_bytes"),
        refuse_unknown_fields=builder.follow("refuse_unknown_fields"),
        ignore_model_name=builder.follow("ignore_model_name"),
    )


def _served_model_name(builder: PlanBuilder, model_path: str, demo_path: str | None) -> Decision[str]:
    if builder.args.http.served_model_name is not None:
        return Decision(builder.args.http.served_model_name, "as asked")
    if builder.args.model.model_path is None and demo_path is not None:
        return Decision(DEMO_NAME, "the demo model's name")
    return Decision(model_path, "the model's path")


def _log_level_http(builder: PlanBuilder) -> Decision[str]:
    args = builder.args.observe
    if args.log_level_http is not None:
        return Decision(args.log_level_http, "as asked")
    return Decision(args.log_level, "that of --log-level")


def _preferred_sampling(builder: PlanBuilder) -> Decision[Mapping[str, Any]]:
    preferred = builder.args.sampling.preferred_sampling_params or {}
    name = "preferred_sampling_params"
    known = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(preferred.keys() - known):
        builder.refuse(name, f"--preferred-sampling-params: {', '.join(unknown)} is no sampling parameter.")
        return Decision({}, "what was asked for cannot be used")
    try:
        SamplingParams(**preferred)
    except InvalidRequest as error:
        builder.refuse(name, f"--preferred-sampling-params: {error.message}")
    except (TypeError, AttributeError):
        builder.refuse(name, "--preferred-sampling-params: a value has the wrong type.")
    return builder.follow(name, preferred)
