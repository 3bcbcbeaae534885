from __future__ import annotations

import copy
from typing import Any

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import PreTrainedTokenizerFast

import tiny_tokenizers
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.tokenizer.chat_template import ChatTemplate, load_template
from runtime.tokenizer.messages import accepted_content

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TINY = tiny_tokenizers.chat_template("byte_bpe")
LLAMA_LIKE = """{% set offset = 1 if messages[0]['role'] == 'system' else 0 %}
{%- if offset %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% endif %}
{%- for message in messages[offset:] %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate, <b> & all.') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first and offset else '') }}
        {{- message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
FEATURES = """{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}
{%- if m.role == 'skip' -%}{%- continue -%}{%- endif -%}
{%- set ns.n = ns.n + 1 -%}
{{ m.role }}{{ ns.n }}: {{ m.reasoning_content | default('-') }}/{{ m.thinking | default('-') }}:
{{ m.content }}
{{ {'a': '<é>', 'k': m.role} | tojson(indent=2) }}{{ dict(x=1)['x'] }}{{ dict.fromkeys('a') }}
{% generation %}{{ extra | default('none') }}{% endgeneration %}
{%- if ns.n > 2 -%}{%- break -%}{%- endif -%}
{%- endfor -%}{{ tools | tojson if tools else 'no tools' }} {{ strftime_now('%Y')[:2] }}
{{ documents is none }}
    {% if tools %}
  with tools
    {% endif %}
end"""
TRIMMING = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{{ eos_token }}{% endfor %}"
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d<é>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"q": "é<"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " hello\n\nthere "}
ASSISTANT = {"role": "assistant", "content": "yes "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user only": [USER],
    "system": [SYSTEM, USER],
    "ends with the assistant": [SYSTEM, USER, ASSISTANT],
    "turns": [USER, ASSISTANT, USER],
    "null fields": [{**USER, "name": None}, {**ASSISTANT, "tool_calls": None}, USER],
    "reasoning": [USER, {**ASSISTANT, "reasoning": "because"}, USER],
    "special tokens in the text": [{"role": "user", "content": "a</s><|im_end|>b"}],
}


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    library = PreTrainedTokenizerFast(tokenizer_object=Library(models.BPE()), **SPECIAL)
    kwargs = {"tokenize": False, "add_generation_prompt": True, "chat_template": source} | options
    return str(library.apply_chat_template(copy.deepcopy(messages), **kwargs))


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("source", [TINY, LLAMA_LIKE, FEATURES], ids=["tiny", "llama", "features"])
def test_renders_as_transformers(source, name):
    messages = CONVERSATIONS[name]
    template = compiled(source)
    before = copy.deepcopy(messages)
    assert template.render(messages) == reference(source, messages)
    assert messages == before
    variations: list[dict[str, Any]] = [
        {"add_generation_prompt": False},
        {"tools": [TOOL]},
        {"extra": "more", "bos_token": "B"},
    ]
    for options in variations:
        assert template.render(messages, **options) == reference(source, messages, **options)


def test_parts_and_tool_calls_render_as_transformers():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    expected = reference(TINY, messages, tools=[TOOL])
    assert compiled(TINY).render(messages, tools=[TOOL]) == expected
    messages[1]["tool_calls"] = [{**CALL, "function": {"name": "f", "arguments": '{"q": "é<"}'}}]
    assert compiled(TINY).render(messages, tools=[TOOL]) == expected


PARTS = [{"type": "text", "text": "yes "}]


@pytest.mark.parametrize(
    ("source", "ending"),
    [(source, text) for source in (TINY, LLAMA_LIKE, TRIMMING) for text in ("yes", "yes \n", "", "<|im_end|>")]
    + [(TINY, PARTS)],
)
def test_final_message_is_continued_as_transformers_does(source, ending):
    messages = [USER, {"role": "assistant", "content": ending}]
    expected = reference(source, messages, continue_final_message=True, add_generation_prompt=False)
    assert compiled(source).render(messages, continue_final_message=True) == expected


def test_parts_are_joined_for_templates_of_strings():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert compiled(LLAMA_LIKE).render([{"role": "user", "content": parts}]) == "<s>[INST] one two [/INST]"


def test_string_becomes_a_part_for_templates_of_parts():
    source = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}|{% endfor %}{% endfor %}"
    assert compiled(source).render([USER]) == " hello\n\nthere |"


@pytest.mark.parametrize(
    ("source", "accepts"),
    [
        (TINY, "both"),
        (LLAMA_LIKE, "string"),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
            "string",
        ),
        (
            "{% for m in messages %}{% for c in m.content.split('x') %}{{ c }}{% endfor %}{% endfor %}",
            "string",
        ),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{% endfor %}{% endfor %}",
            "parts",
        ),
        (
            "{% for m in messages %}{% for p in m.content | selectattr('type') %}{% endfor %}{% endfor %}",
            "parts",
        ),
        ("{% if m.content is string %}{% else %}{% for p in m.content %}{% endfor %}{% endif %}", "both"),
    ],
)
def test_kind_of_content_is_read_from_the_template(source, accepts):
    tree = Environment().parse(source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    assert accepted_content(tree) == accepts


def test_texts_are_replaced_in_loops_that_have_variables():
    source = "{% for m in messages %}{% set c = m.content %}{{ c.replace('l', 'L').strip() }}{% endfor %}"
    assert compiled(source).render([USER]) == reference(source, [USER]) == "heLLo\n\nthere"


@pytest.mark.parametrize(
    ("source", "message", "text"),
    [
        (  # iterates over `content` without testing its type, and accepts texts only
            "{% for m in messages %}{% if m.role == 'call' %}{% for c in m.content %}{% endfor %}{% endif %}"
            "{{ 'user ' + m['content'] }}{% endfor %}",
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            "user hello",
        ),
        (  # supports calls without content, but reads the content before the test
            "{% for m in messages %}{{ 'thought ' if '</think>' in m.content }}"
            "{% if m.content is none %}none{% endif %}{{ m.tool_calls | length }} call{% endfor %}",
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "1 call",
        ),
    ],
)
def test_messages_are_given_in_another_way_to_a_template_that_fails(source, message, text):
    assert compiled(source).render([message]) == text


@pytest.mark.parametrize(
    "source",
    ["{{ '# ' + tools[0].function.description }}", "# {{ tools[0].function.parameters.properties | items }}"],
)
def test_tools_may_leave_out_what_their_template_reads(source):
    for given in ({"name": "f"}, {"name": "f", "parameters": {}}, {"name": "f", "parameters": None}):
        assert compiled(source).render([USER], tools=[{"type": "function", "function": given}]).startswith("# ")
    assert (
        compiled("{{ tools }}").render([USER], tools=[{"function": {"name": "f"}}]) == "[{'function': {'name': 'f'}}]"
    )


def test_tool_template_is_used_for_requests_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "1 tools"


def test_refusal_of_the_template_reaches_the_sender():
    with pytest.raises(InvalidRequest, match=r"refuses these messages: Roles must alternate, <b> & all\.$"):
        compiled(LLAMA_LIKE).render([USER, USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_breaks_inside_the_template_is_a_clean_refusal(source):
    with pytest.raises(InvalidRequest) as caught:
        compiled(source).render([USER])
    assert caught.value.message == "The chat template cannot render these messages."


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages.0"),
        ([USER, {"content": "x"}], "messages.1.role"),
        ([{"role": "user<|im_end|>", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_their_path(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        compiled(TINY).render(messages)
    assert caught.value.param == param


def test_what_cannot_be_continued_is_refused():
    with pytest.raises(InvalidRequest, match="no text to continue"):
        compiled(TINY).render([USER, {"role": "assistant"}], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="leaves the final message out"):
        compiled("constant").render([USER, ASSISTANT], continue_final_message=True)


def test_variables_of_ours_are_not_the_senders():
    reserved: dict[str, Any] = {"messages": []}
    with pytest.raises(InvalidRequest, match="may not set messages"):
        compiled(TINY).render([USER], **reserved)


def test_chosen_file_replaces_the_tokenizers_own(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}\\n{{ eos_token }}\n")
    template = load_template(str(path), {"default": TINY}, SPECIAL)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x\n</s>"
    assert load_template(None, {}, SPECIAL) is None


def test_unusable_choices_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"write the template to a \.jinja file"):
        load_template("no_such_template", {}, SPECIAL)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_template(str(tmp_path / "none.jinja"), {}, SPECIAL)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(ConfigurationError, match="not valid jinja"):
        load_template(str(tmp_path / "broken.jinja"), {}, SPECIAL)
