"""A round trip of calls: the format is guessed from a chat template, which renders calls that are then parsed.

The templates are written for this test. They contain only each family's format of calls, and its rules for messages.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, guess
from runtime.tokenizer.chat_template import ChatTemplate
from serve.calls.chat.events import collect, new_call_id
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.prepare import _with_ids
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
from tool_call_texts import TOOLS

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Ō "q"\nx', "days": 3, "opt": {"a": [1, None, True]}}),
    ("stop", {}),
]
USER = {"role": "user", "content": "Hi"}

JSON = "{{ f.arguments | tojson }}"
OBJECT = '{"name": "{{ f.name }}", "arguments": ' + JSON + "}"
LLAMA = '{"name": "{{ f.name }}", "parameters": ' + JSON + "}"
VALUE = "{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}"
PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %})"
)
NINE = "{% if call.id | length != 9 %}{{ raise_exception('Ids have nine characters.') }}{% endif %}"


def each(text: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + text + "{% endfor %}"


class Family(NamedTuple):
    parser: str
    call: str
    around: tuple[str, str, str] = ("", "\n", "")  # text before, between and after the calls
    marks: str = ""  # further text of the template that reveals the format
    reasoning: str | None = None
    prompt: str = ""
    num_calls: int = 2
    condition: str = "m.tool_calls"

    @property
    def template(self) -> str:
        before, between, behind = self.around
        return (
            "{#" + self.marks + "#}{% for m in messages %}{% if m.role == 'assistant' and " + self.condition + " %}"
            + before + "{% for call in m.tool_calls %}{% set f = call.function %}" + self.call
            + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}" + behind
            + "{% elif m.role == 'tool' %}[result {{ m.tool_call_id }}: {{ m.content }}]"
            + "{% else %}[{{ m.role }}]{{ m.content + '' }}{% endif %}{% endfor %}"
            + "{% if add_generation_prompt %}" + self.prompt + "{% endif %}"
        )  # fmt: skip


CALL, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
SECTION = ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")
FENCED = f"{{{{ '{CALL}function{SEP}' + f.name + '\\n```json\\n' + f.arguments + '\\n```{END}' }}}}"
DSML = "{% set dsml = '｜DSML｜' %}"
FUNCTION = "<function={{ f.name }}>\n" + each("<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n") + "</function>"
STEP = '<steptml:parameter name="{{ k }}">' + VALUE + "</steptml:parameter>"
GEMMA = (
    "<|tool_call>call:{{ f.name + '{' }}{% for k, v in f.arguments.items() %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{a:[1,None,true]}{% else %}{{ v }}{% endif %}'
    "{{ '' if loop.last else ',' }}{% endfor %}}<tool_call|>"
)

FAMILIES = [
    Family("qwen25", f"<tool_call>\n{OBJECT}\n</tool_call>", marks="enable_thinking <think>", reasoning="qwen3"),
    Family("llama3", LLAMA, ("", "; ", "<|eot_id|>"), '<|start_header_id|> "parameters"'),
    Family("llama4", LLAMA, ("<|python_start|><|python_end|>", "", ""), "<|header_start|>"),
    Family("mistral", NINE + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]" + JSON, ("", "", "")),
    Family("mistral", NINE + "[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON, ("", "", ""), "[THINK]", "mistral"),
    Family(
        "mistral-list",
        NINE + OBJECT[:-1] + ', "id": "{{ call.id }}"}',
        ("[TOOL_CALLS] [", ", ", "]"),
    ),
    Family("deepseekv3", FENCED, SECTION, "</think>", "deepseek-v3", condition="m.content is none"),
    Family("deepseekv31", f"{CALL}{{{{ f.name }}}}{SEP}{JSON}{END}", SECTION),
    Family(
        "deepseekv32",
        DSML + '<{{ dsml }}invoke name="{{ f.name }}">\n'
        + each('<{{ dsml }}parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">'
               + VALUE + "</{{ dsml }}parameter>\n")
        + "</{{ dsml }}invoke>",
        (DSML + "<{{ dsml }}function_calls>\n", "\n", "\n</{{ dsml }}function_calls>"),
    ),
    Family(
        "kimi_k2",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
    Family("qwen3_coder", f"<tool_call>\n{FUNCTION}\n</tool_call>"),
    Family("seed_oss", f"<seed:tool_call>\n{FUNCTION}\n</seed:tool_call>", marks="<seed:think>", reasoning="seed_oss"),
    Family(
        "glm45",
        "<tool_call>{{ f.name }}\n" + each(
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{% if v is string %}{{ v }}{% else %}"
            "{{ v | tojson(ensure_ascii=False) }}{% endif %}</arg_value>\n"
        ) + "</tool_call>",
        marks="<think>",
        reasoning="glm45",
    ),
    Family(
        "step3",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ f.name }}">' + each(STEP)
        + "</steptml:invoke><｜tool_call_end｜>",
        ("<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>"),
    ),
    Family(
        "minimax-m2",
        '<invoke name="{{ f.name }}">\n' + each('<parameter name="{{ k }}">' + VALUE + "</parameter>\n") + "</invoke>",
        ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
        "<think>",
        "minimax",
    ),
    Family(
        "gpt-oss",
        "{% if loop.first %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        + JSON + "<|call|>{% endif %}",
        ("", "", ""),
        reasoning="gpt-oss",
        prompt="<|start|>assistant",
        num_calls=1,
    ),
    Family("gemma4", GEMMA, ("", "", "")),
    Family("granite", OBJECT, ("<|tool_call|>[", ", ", "]"), "<|start_of_role|> <think>", "qwen3"),
    Family("phi4", OBJECT, ("<|tool_call|>[", ", ", "]<|/tool_call|>"), "<|/tool|>"),
    Family("nemotron", OBJECT, ("<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    Family("hunyuan", OBJECT, ("<tool_calls>[", ", ", "]</tool_calls>")),
    Family("interns1", f"<|action_start|><|plugin|>\n{LLAMA}<|action_end|>"),
    Family(
        "command_r",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + JSON + "}",
        ("<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>"),
        "<|START_THINKING|>",
        "command_r",
    ),
    Family("lfm2", PYTHON, ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), "List of tools: ["),
    Family("olmo3", PYTHON, ("<function_calls>", "\n", "</function_calls>")),
    Family("pythonic", PYTHON, ("[", ", ", "]"), "[func_name1("),
]  # fmt: skip


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_calls_come_back_from_the_template(family: Family, content: str | None) -> None:
    assert (guess(TOOL_CALL_PARSERS, family.template) or ("",))[0] == family.parser
    assert (guess(REASONING_PARSERS, family.template) or (None,))[0] == family.reasoning
    template = ChatTemplate({"default": family.template}, {})
    form = FORMATS.get(family.parser)
    ids = [new_call_id() for _ in CALLS]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for call_id, (name, arguments) in zip(ids, CALLS)
    ]
    chat: list[Any] = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call_id, "content": "sunny"} for call_id in ids),
    ]
    chat = chat if form is None or form.shaped_id is None else _with_ids(chat, form.shaped_id)

    prompt = template.render(chat[:1], tools=TOOLS)
    written = template.render(chat[:2], tools=TOOLS, add_generation_prompt=False)
    output = written.removeprefix(prompt.removesuffix(family.prompt)).removesuffix("<|eot_id|>")
    offered = read_tools(TOOLS)
    settings = ParserSettings(calls=form, harmony=form is None, tools=offered)
    for pieces in ([output], list(output)):
        parser = OutputParser(settings)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.feed("", final=True)
        message = collect(events)
        found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        assert found == CALLS[: family.num_calls]
        assert message.content is None
    again = template.render(chat, tools=TOOLS)
    assert again.startswith(written)
    assert again.count("sunny") == 2


def test_results_find_their_calls_under_the_templates_ids() -> None:
    calls = [{"id": "", "type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    chat = [{"role": "assistant", "tool_calls": calls}, {"role": "tool"}, {"role": "tool"}, {"role": "user"}]
    shaped = FORMATS["kimi_k2"].shaped_id
    assert shaped is not None
    made = _with_ids(chat, shaped)
    assert [call["id"] for call in made[0]["tool_calls"]] == ["functions.a:0", "functions.b:1"]
    assert [message.get("tool_call_id") for message in made[1:]] == ["functions.a:0", "functions.b:1", None]


@pytest.mark.parametrize(("name", "length"), [("mistral", 9), ("qwen25", 29)])
def test_new_ids_are_as_the_template_takes_them(name: str, length: int) -> None:
    text = (
        "[TOOL_CALLS]stop{}[TOOL_CALLS]stop{}" if name == "mistral" else '<tool_call>{"name": "stop"}</tool_call>' * 2
    )
    settings = ParserSettings(calls=FORMATS[name], tools=read_tools(TOOLS))
    ids = {call.id for call in collect(OutputParser(settings).feed(text, final=True)).tool_calls}
    assert [len(call_id) for call_id in ids] == [length, length]
