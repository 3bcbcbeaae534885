"""vLLM's formats of prompts, and its `LoRARequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from serve.python.arguments import as_json

Prompts = Any  # a text, {"prompt": text}, {"prompt_token_ids": ids}, ids, or a list of these
TextPrompt = dict[str, Any]  # {"prompt": text}
TokensPrompt = dict[str, Any]  # {"prompt_token_ids": ids}


@dataclass(slots=True)
class LoRARequest:
    """A LoRA adapter for a request: its name, and the folder from which it is loaded at its first use.

    `lora_int_id` has no effect, because Penstock identifies adapters by name.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | None = None


def prompts_of(prompts: Prompts) -> list[str | list[int]]:
    """Return each prompt as a text or as token ids. Raises `InvalidRequest` for other formats."""
    if isinstance(prompts, str | Mapping):
        return [prompt_of(prompts)]
    prompts = as_json(prompts) if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a text, ids or a list, not {type(prompts).__name__}.", param="prompts")
    if prompts and isinstance(prompts[0], int):
        return [prompt_of(prompts)]
    return [prompt_of(each) for each in prompts]


def prompt_of(prompt: Any) -> str | list[int]:
    """Return one prompt as a text or as token ids. Raises `InvalidRequest` for other formats."""
    if isinstance(prompt, Mapping):
        given = {name for name, value in prompt.items() if value is not None and value != {}}
        unknown = given - {"prompt", "prompt_token_ids"}
        if unknown:
            raise InvalidRequest(f"A prompt has {min(unknown)}, which is not supported; only text and ids are.")
        if not given:
            raise InvalidRequest("A prompt must have prompt or prompt_token_ids.", param="prompts")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in given else prompt["prompt"]
    return prompt if isinstance(prompt, str) else as_json(prompt)
