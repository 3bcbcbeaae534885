"""Reads a tokenizer's files: the library object, its named special tokens, its chat templates.

A checkpoint with a tokenizer.json is read without transformers, to the same result as AutoTokenizer's general
class; importing and asking transformers costs 1.5 s more. Other formats (sentencepiece, tiktoken, code of
their own) and `--tokenizer-mode slow` go through AutoTokenizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from runtime.config.plan import TextPlan
from runtime.errors import ConfigurationError
from runtime.tokenizer.backend import Backend, FastBackend, SlowBackend

logger = logging.getLogger("penstock.tokenizer")


class Source(NamedTuple):
    backend: Backend
    special: Mapping[str, str]  # "eos_token" -> "</s>"
    templates: Mapping[str, str]  # "default", and perhaps "tool_use"


def read(plan: TextPlan) -> Source:
    """Raises ConfigurationError saying which file is missing or broken."""
    if plan.tokenizer_path is None:
        raise ConfigurationError("There is no tokenizer to load: tokenizer_path is empty.")
    path = Path(plan.tokenizer_path)
    if not path.is_dir():
        raise ConfigurationError(f"--tokenizer-path {path} is not a directory.")
    config = _read_json(path / "tokenizer_config.json")
    own_code = _names_own_code(config)
    has_json = (path / "tokenizer.json").is_file()
    if own_code and not plan.trust_remote_code:
        if not has_json:
            raise ConfigurationError(
                f"The tokenizer in {path} is Python code of its own: read it, then pass --trust-remote-code."
            )
        logger.warning("%s names tokenizer code of its own; its tokenizer.json is used instead.", path)
        own_code = False
    if has_json and not own_code and plan.mode != "slow":
        return _read_directly(path, config)
    return _read_with_transformers(path, plan)


def _read_directly(path: Path, config: dict[str, Any]) -> Source:
    try:
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigurationError(f"{path / 'tokenizer.json'} cannot be read: {error}.") from error
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= _read_json(path / "special_tokens_map.json")
    special = {
        key: text
        for key, value in named.items()
        if key.endswith("_token") and (text := _token_text(value)) is not None
    }
    _add_tokens(library, config.get("added_tokens_decoder") or {}, [*special.values(), *_extra_tokens(named)])
    return Source(FastBackend(library), special, _read_templates(path, config))


def _add_tokens(library: tokenizers.Tokenizer, listed: Mapping[str, Any], special: list[str]) -> None:
    """Add what the configuration names and tokenizer.json lacks, in the order of the configuration's ids."""
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for _, value in sorted(listed.items(), key=lambda item: int(item[0])):
        if value["content"] not in known:
            known.add(value["content"])
            library.add_tokens([tokenizers.AddedToken(**value)])
    for text in special:
        if text not in known:
            known.add(text)
            library.add_special_tokens([text])


def _read_with_transformers(path: Path, plan: TextPlan) -> Source:
    from transformers import AutoTokenizer

    try:
        library = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=plan.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(f"transformers cannot load the tokenizer in {path}: {error}") from error
    inner = getattr(library, "backend_tokenizer", None)
    backend = FastBackend(inner) if isinstance(inner, tokenizers.Tokenizer) else SlowBackend(library)
    found = getattr(library, "chat_template", None) or {}
    templates = {"default": found} if isinstance(found, str) else dict(found)
    return Source(backend, dict(library.special_tokens_map), templates)


def _read_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files beside the configuration come before the configuration's own entry."""
    found: dict[str, str] = {}
    single = path / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    if found:
        return found
    entry = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template") or {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return dict(entry)


def _names_own_code(config: dict[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    return [text for value in values if (text := _token_text(value)) is not None]


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object.")
    return content
