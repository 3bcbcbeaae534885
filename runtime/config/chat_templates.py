"""Chat templates by name (`--chat-template llama-3`), and templates of fill-in-the-middle prompts.

The chat templates are for checkpoints without a chat template. Each one writes prompts in the format that the publisher
of the model family describes. Only "vicuna_v1.1" adds a system message if the messages have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from runtime.config.template_files import read_json
from runtime.errors import ConfigurationError

# Variables of chat templates that come from fields of a request. `chat_template_kwargs` may not contain them.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_TURNS = "{% for message in messages %}"
# Sets `system` and `turns` (the other messages), for families that write the system message into a user's turn.
_SYSTEM_FIRST = """{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}\
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"""

CHAT_TEMPLATES: Mapping[str, str] = {
    "chatml": _TURNS
    + """{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "gemma-it": _SYSTEM_FIRST
    + """{{ bos_token }}{% for message in turns %}\
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}\
{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}\
{{ message.content | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "llama-2": _SYSTEM_FIRST
    + """{% for message in turns %}{% if message.role == 'user' %}{{ bos_token }}{{ '[INST] ' }}\
{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}\
{{ message.content | trim + ' [/INST]' }}\
{% else %}{{ ' ' + message.content | trim + ' ' }}{{ eos_token }}{% endif %}{% endfor %}""",
    "llama-3": "{{ bos_token }}"
    + _TURNS
    + """{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "llama-4": "{{ bos_token }}"
    + _TURNS
    + """{{ '<|header_start|>' + message.role + '<|header_end|>\n\n' + message.content | trim + '<|eot|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}""",
    "mistral": _SYSTEM_FIRST
    + """{{ bos_token }}{% for message in turns %}{% if message.role == 'user' %}{{ '[INST] ' }}\
{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ message.content + ' [/INST]' }}\
{% else %}{{ ' ' + message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}""",
    "vicuna_v1.1": _SYSTEM_FIRST
    + """{{ system or 'A chat between a curious user and an artificial intelligence assistant. The assistant gives \
helpful, detailed, and polite answers to the user\\'s questions.' }}\
{% for message in turns %}{% if message.role == 'user' %}{{ ' USER: ' + message.content | trim }}\
{% else %}{{ ' ASSISTANT: ' + message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}""",
}
OTHER_NAMES = {"llama-3-instruct": "llama-3", "vicuna": "vicuna_v1.1"}
JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")


def chat_template_named(choice: str) -> str | None:
    """Return the jinja text of a built-in template, or None if the choice is a file's path.

    Raises `ConfigurationError` if the choice is neither.
    """
    found = CHAT_TEMPLATES.get(OTHER_NAMES.get(choice, choice))
    if found is not None:
        return found
    if Path(choice).suffix in JINJA_SUFFIXES:
        return None
    raise ConfigurationError(
        f"--chat-template {choice} is neither a .jinja file nor a name; names are {', '.join(CHAT_TEMPLATES)}. "
        "JSON conversations are not supported: write the template to a .jinja file."
    )


class MiddleTemplate(NamedTuple):
    """A prompt format that asks for the text between a prefix and a suffix."""

    begin: str
    hole: str  # token that stands for the missing text
    end: str
    position: Literal["MIDDLE", "END"]  # position of `hole`: between prefix and suffix, or after both

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt whose continuation is the text between prefix and suffix."""
        if self.position == "MIDDLE":
            return f"{self.begin}{prefix}{self.hole}{suffix}{self.end}"
        return f"{self.begin}{prefix}{self.end}{suffix}{self.hole}"


MIDDLE_TEMPLATES: Mapping[str, MiddleTemplate] = {
    "deepseek_coder": MiddleTemplate("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "MIDDLE"),
    "qwen_coder": MiddleTemplate("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "END"),
    "star_coder": MiddleTemplate("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "END"),
}


def middle_template(choice: str) -> MiddleTemplate:
    """Return a built-in template by name, or read it from a JSON file.

    Raises `ConfigurationError` if `choice` is neither a name nor a file, or if the file is invalid.
    """
    if choice in MIDDLE_TEMPLATES:
        return MIDDLE_TEMPLATES[choice]
    if not Path(choice).is_file():
        raise ConfigurationError(
            f"--completion-template {choice} is neither a file nor one of {', '.join(MIDDLE_TEMPLATES)}."
        )
    found = read_json(Path(choice))
    names = ("fim_begin_token", "fim_middle_token", "fim_end_token")
    position = str(found.get("fim_position", "")).upper()
    if not all(isinstance(found.get(name), str) for name in names) or position not in ("MIDDLE", "END"):
        raise ConfigurationError(
            f"--completion-template {choice}: the file must hold {', '.join(names)} and fim_position, which is "
            "MIDDLE or END."
        )
    begin, middle, end = (found[name] for name in names)
    return MiddleTemplate(begin, middle, end, "MIDDLE" if position == "MIDDLE" else "END")
