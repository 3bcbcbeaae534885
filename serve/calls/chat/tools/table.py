"""All formats of tool calls, by the names of `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Mapping

from serve.calls.chat.tools import gemma4, named, objects, pythonic, tagged
from serve.calls.chat.tools.format import ToolFormat

# Harmony is one format for reasoning and calls: serve.calls.chat.harmony.
FORMATS: Mapping[str, ToolFormat] = {
    name: form for file in (objects, named, tagged, pythonic, gemma4) for name, form in file.FORMATS.items()
}
