"""Valid values of options."""

from __future__ import annotations

from typing import Any

from runtime.config import Json, Option

# Options whose next number is refused in most situations.
NUMBERS = {"ep_num_redundant_experts": 2, "expert_distribution_recorder_buffer_size": 5, "offload_group_size": 1}


def other_value(option: Option) -> Any:
    """Return a valid value that is not the default."""
    spec = option.spec
    if option.name in NUMBERS:
        return NUMBERS[option.name]
    if option.type is bool:
        one: Any = not option.default
    elif spec.choices:
        one = next(choice for choice in reversed(spec.choices) if choice != option.default)
    elif option.type in (int, float):
        step = 1 if option.type is int else 0.125
        low = spec.low if spec.low is not None else spec.above if spec.above is not None else 0
        one = option.type(next(v for v in (low + step, low + 2 * step) if v != option.default))
    elif option.type is Json:
        known = {
            "speculative_config": {"method": "ngram"},
            "speculative_adaptive": {"min_gain": 1.5},
            "service_tier_priorities": {"flex": -1},
            "api_key_weights": {"chat": 4},
            "default_chat_template_kwargs": {"enable_thinking": False},
        }
        one = known.get(option.name, {"temperature": 0.5})
    else:
        one = "something"
    return (one,) if option.many else one
