"""Whether the model is to think before it answers, as variables of chat templates."""

from __future__ import annotations


def thinking_switch(enabled: bool) -> dict[str, bool]:
    """Both words that templates use: Qwen's and its followers', DeepSeek's."""
    return {"enable_thinking": enabled, "thinking": enabled}
