"""Names of the formats of tool calls and reasoning, and the texts ("signs") that reveal each in a chat template.

`serve.calls.chat` implements the formats; a test checks that both lists have the same names. A format is guessed if the
chat template contains all of its signs. The first match counts, so more specific formats come first.

Formats whose outputs begin inside the reasoning block are not guessed: if a model did not reason, its whole answer
would be treated as reasoning. `step3` is guessed nevertheless, because the chat templates of its models open the block.
"""

from __future__ import annotations

from collections.abc import Mapping

Signs = tuple[str, ...]  # (): never guessed

TOOL_CALL_PARSERS: Mapping[str, Signs] = {
    "gpt-oss": ("<|channel|>", "<|message|>"),
    "llama4": ("<|header_start|>", "<|python_start|>"),
    "nemotron": ("<TOOLCALL>",),
    "pythonic": ("[func_name1(",),
    "llama3": ("<|start_header_id|>", '"parameters"'),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral-list": ("[TOOL_CALLS]",),
    "deepseekv32": ("｜DSML｜",),
    "deepseekv3": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
    "deepseekv31": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "step3": ("<steptml:invoke",),
    "minimax-m2": ("<minimax:tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "lfm2": ("List of tools: ",),
    "phi4": ("<|/tool|>",),
    "granite": ("<|start_of_role|>", "<|tool_call|>"),
    "command_r": ("<|START_ACTION|>",),
    "interns1": ("<|plugin|>", "<|action_start|>"),
    "hunyuan": ("<tool_calls>",),
    "olmo3": ("<function_calls>",),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "glm45": ("<tool_call>", "<arg_key>"),
    "qwen25": ("<tool_call>",),
    "gemma3": (),
    "glm47": (),
    "hermes": (),
    "json": ('"tool_call_name"',),
    "qwen": (),
    "step3p5": (),
}

REASONING_PARSERS: Mapping[str, Signs] = {
    "gpt-oss": ("<|channel|>", "<|message|>"),
    "kimi": ("◁think▷",),
    "seed_oss": ("<seed:think>",),
    "mistral": ("[THINK]",),
    "gemma4": ("<|channel>",),
    "command_r": ("<|START_THINKING|>",),
    "step3": ("<steptml:invoke", "<think>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<think>"),
    "minimax": ("<minimax:tool_call>", "<think>"),
    "glm45": ("<arg_key>", "<think>"),
    "deepseek-v3": ("<｜tool▁call▁begin｜>", "</think>"),
    "qwen3": ("<think>",),
    "deepseek-r1": (),
    "granite": (),
    "interns1": (),
    "nemotron_3": (),
    "qwen3-thinking": (),
    "step3p5": (),
}


# Weaker signs, for further templates with these formats. They count only if no sign above matches.
_WEAK_SIGNS = (("llama4", "<|header_start|>"), ("phi4", "functools["))


def guess(parsers: Mapping[str, Signs], template: str) -> tuple[str, str] | None:
    """Return (name, sign) of the first format whose signs the template contains, or None."""
    for name, signs in parsers.items():
        if signs and all(sign in template for sign in signs):
            return name, signs[0]
    return next(((name, sign) for name, sign in _WEAK_SIGNS if name in parsers and sign in template), None)
