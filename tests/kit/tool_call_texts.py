"""Outputs with tool calls in every format: the text "Hi there." if the format allows text, and the same two calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "opt": {"type": "object"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
CALLS = [
    ("get_weather", {"city": 'S"{ö} </tool_call> Paulo 🚀', "days": 3, "opt": {"a": [1, {"b": "}"}]}}),
    ("stop", {}),
]
WITHOUT_TEXT = {"llama3", "json"}  # formats in which calls begin the output

TEXTS: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ALIASES = {
    "glm47": "glm45",
    "hermes": "qwen25",
    "qwen": "qwen25",
    "step3p5": "qwen3_coder",
}
