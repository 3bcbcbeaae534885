"""The sections of the plan about text and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from runtime.errors import InvalidRequest
from runtime.plan import ServePlan, TextPlan
from runtime.request import SamplingParams
from runtime.resolve.ledger import Ledger

DEMO_NAME = "penstock-demo"


def text_plan(ledger: Ledger, model_path: str) -> TextPlan:
    args = ledger.args.text
    if args.chat_template is not None and not args.chat_template.endswith(".jinja"):
        ledger.refuse(
            "chat_template",
            f"--chat-template {args.chat_template}: only .jinja files work so far; write it as one.",
        )
    return TextPlan(
        tokenizer_path=_tokenizer_path(ledger, model_path),
        mode=ledger.take("text.mode", "tokenizer_mode"),
        trust_remote_code=ledger.take("text.trust_remote_code", "trust_remote_code"),
        revision=ledger.take("text.revision", "revision"),
        chat_template=ledger.take("text.chat_template", "chat_template"),
    )


def _tokenizer_path(ledger: Ledger, model_path: str) -> str | None:
    place = "text.tokenizer_path"
    if ledger.args.text.skip_tokenizer_init:
        if ledger.args.text.tokenizer_path is not None:
            ledger.refuse("tokenizer_path", "--tokenizer-path and --skip-tokenizer-init exclude each other.")
        return ledger.decide(place, None, "as asked: token ids in, token ids out")
    if ledger.args.text.tokenizer_path is not None:
        return ledger.decide(place, ledger.args.text.tokenizer_path, "as asked")
    return ledger.decide(place, model_path, "the model's folder")


def serve_plan(ledger: Ledger, model_path: str, demo_path: str | None) -> ServePlan:
    args = ledger.args.http
    if args.api_key is not None and not args.api_key.strip():
        ledger.refuse("api_key", "--api-key is empty; leave it out to ask for no key.")
    return ServePlan(
        host=ledger.take("serve.host", "host"),
        port=ledger.take("serve.port", "port"),
        api_key=ledger.take("serve.api_key", "api_key"),
        served_model_name=_served_model_name(ledger, model_path, demo_path),
        log_level=ledger.take("serve.log_level", "log_level"),
        log_level_http=_log_level_http(ledger),
        skip_warmup=ledger.take("serve.skip_warmup", "skip_server_warmup"),
        cache_report=ledger.take("serve.cache_report", "enable_cache_report"),
        preferred_sampling=_preferred_sampling(ledger),
        allow_auto_truncate=ledger.take("serve.allow_auto_truncate", "allow_auto_truncate"),
        weight_version=ledger.take("serve.weight_version", "weight_version"),
        chat_page=ledger.take("serve.chat_page", "disable_chat_page", not args.disable_chat_page),
    )


def _served_model_name(ledger: Ledger, model_path: str, demo_path: str | None) -> str:
    place = "serve.served_model_name"
    if ledger.args.http.served_model_name is not None:
        return ledger.decide(place, ledger.args.http.served_model_name, "as asked")
    if ledger.args.model.model_path is None and demo_path is not None:
        return ledger.decide(place, DEMO_NAME, "the demo model's name")
    return ledger.decide(place, model_path, "the model's path")


def _log_level_http(ledger: Ledger) -> str:
    args = ledger.args.observe
    if args.log_level_http is not None:
        return ledger.decide("serve.log_level_http", args.log_level_http, "as asked")
    return ledger.decide("serve.log_level_http", args.log_level, "that of --log-level")


def _preferred_sampling(ledger: Ledger) -> Mapping[str, Any]:
    preferred = ledger.args.sampling.preferred_sampling_params or {}
    name = "preferred_sampling_params"
    known = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(preferred.keys() - known):
        ledger.refuse(name, f"--preferred-sampling-params: {', '.join(unknown)} is no sampling parameter.")
        return {}
    try:
        SamplingParams(**preferred)
    except InvalidRequest as error:
        ledger.refuse(name, f"--preferred-sampling-params: {error.message}")
    except (TypeError, AttributeError):
        ledger.refuse(name, "--preferred-sampling-params: a value has the wrong type.")
    return ledger.take("serve.preferred_sampling", name, preferred)
