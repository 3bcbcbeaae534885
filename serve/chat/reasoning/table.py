"""Every format of reasoning by the names that `--reasoning-parser` takes."""

from __future__ import annotations

from collections.abc import Mapping

from serve.chat.reasoning.format import ReasoningFormat

_THINK = ReasoningFormat(open="<think>", close="</think>")
_THINKS = ReasoningFormat(open="<think>", close="</think>", forced=True)

# Harmony is one format of reasoning and calls together: serve.chat.harmony.
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": _THINKS,
    "deepseek-v3": _THINK,
    "glm45": ReasoningFormat(open="<think>", close="</think>", also_ends=("<tool_call>",)),
    "kimi": ReasoningFormat(open="◁think▷", close="◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": _THINKS,
    "step3": _THINKS,
    "command_r": ReasoningFormat(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    "gemma4": ReasoningFormat(open="<|channel>thought\n", close="<channel|>"),
    "granite": ReasoningFormat(open="Here is my thought process:", close="Here is my response:"),
    "interns1": _THINK,
    "kimi_k2": ReasoningFormat(open="<think>", close="</think>", also_ends=("<|tool_calls_section_begin|>",)),
    "minimax": ReasoningFormat(open="<think>", close="</think>", also_ends=("<minimax:tool_call>",)),
    "mistral": ReasoningFormat(open="[THINK]", close="[/THINK]"),
    "nemotron_3": _THINK,
    "seed_oss": ReasoningFormat(open="<seed:think>", close="</seed:think>"),
    "step3p5": _THINKS,
}
