"""Every format of tool calls by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from collections.abc import Mapping

from serve.chat.tools.format import ToolFormat
from serve.chat.tools.gemma4 import GEMMA4
from serve.chat.tools.named import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL, MISTRAL_LIST
from serve.chat.tools.objects import (
    COMMAND_R,
    GRANITE,
    HERMES,
    HUNYUAN,
    INTERNLM,
    JSON,
    LLAMA3,
    NEMOTRON,
    PHI4,
)
from serve.chat.tools.pythonic import GEMMA3, LFM2, LLAMA4, OLMO3, PYTHONIC
from serve.chat.tools.tagged import DEEPSEEK_V32, GLM45, MINIMAX, QWEN3_CODER, SEED_OSS, STEP3

# Harmony is one format of reasoning and calls together: serve.chat.harmony.
FORMATS: Mapping[str, ToolFormat] = {
    "llama3": LLAMA3,
    "qwen25": HERMES,
    "mistral": MISTRAL,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "pythonic": PYTHONIC,
    "kimi_k2": KIMI_K2,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "step3": STEP3,
    "command_r": COMMAND_R,
    "deepseekv32": DEEPSEEK_V32,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "glm47": GLM45,
    "granite": GRANITE,
    "hermes": HERMES,
    "hunyuan": HUNYUAN,
    "interns1": INTERNLM,
    "json": JSON,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "minimax-m2": MINIMAX,
    "mistral-list": MISTRAL_LIST,
    "nemotron": NEMOTRON,
    "olmo3": OLMO3,
    "phi4": PHI4,
    "qwen": HERMES,
    "seed_oss": SEED_OSS,
    "step3p5": QWEN3_CODER,
}
