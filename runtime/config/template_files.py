"""Reads a tokenizer's configuration and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ConfigurationError


def read_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates in a tokenizer's folder, by name. Template files replace the templates in `config`."""
    found: dict[str, str] = {}
    single = path / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    if found:
        return found
    entry = config.get("chat_template") or read_json(path / "chat_template.json").get("chat_template") or {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return dict(entry)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist. Raises `ConfigurationError` if it is invalid."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object.")
    return content
