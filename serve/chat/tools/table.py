"""Every format of tool calls by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from collections.abc import Mapping

from serve.chat.tools import gemma4, named, objects, pythonic, tagged
from serve.chat.tools.format import ToolFormat

# Harmony is one format of reasoning and calls together: serve.chat.harmony.
FORMATS: Mapping[str, ToolFormat] = {
    name: form for file in (objects, named, tagged, pythonic, gemma4) for name, form in file.FORMATS.items()
}
