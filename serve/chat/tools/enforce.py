"""Calls that the model must make, or must make right, as a grammar in llguidance's dialect of Lark.

What is enforced is the format that the model writes anyway, with the arguments' JSON held to each tool's schema.
Formats with parameters between tags hold the arguments as one JSON object there, which their readers take too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from serve.chat.reasoning import ReasoningFormat
from serve.chat.tools.choice import ToolChoice
from serve.chat.tools.format import ToolFormat
from serve.chat.tools.offered import Tool

# JSON as models are trained to write it, without the endless white space that a sampler may fall into.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLAIN_KEYS = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
    "$schema",
}  # fmt: skip
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")  # in regular expressions
_ANY_OBJECT = {"type": "object"}
# Arguments of a call in Python that need not match a schema.
_ANY_PYTHON = r"""any_arguments: (KEY "=" any_value (GAP KEY "=" any_value)*)?
any_value: STRING | NUMBER | WORD | "[" any_items? "]" | "(" any_items? ")" | "{" any_pairs? "}"
any_items: any_value (GAP any_value)* GAP?
any_pairs: STRING COLON any_value (GAP STRING COLON any_value)* GAP?
KEY: /[A-Za-z_][A-Za-z_0-9]{0,127}/
STRING: /"([^"\\]|\\(?s:.))*"|'([^'\\]|\\(?s:.))*'/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WORD: /True|False|None|true|false|null/
GAP: /[ \n]{0,8},[ \n]{0,8}/
COLON: /[ \n]{0,8}:[ \n]{0,8}/"""

HARMONY_CALL = ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Marks:
    """Which marks are tokens that llguidance does not see as text: special ones, and added ones such as <tool_call>."""

    ids: Mapping[str, int]

    def terms(self, text: str) -> str:
        """The text as a sequence of Lark's terms."""
        marks = [mark for mark in self.ids if mark in text]
        if not marks:
            return json.dumps(text, ensure_ascii=False) if text else ""
        pieces = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
        return " ".join(self._term(piece) for piece in pieces if piece)

    def head(self, text: str) -> str:
        """What of the text stands before the first of these tokens."""
        return text[: min((text.index(mark) for mark in self.ids if mark in text), default=len(text))]

    def _term(self, piece: str) -> str:
        return f"<[{self.ids[piece]}]>" if piece in self.ids else json.dumps(piece, ensure_ascii=False)


def calls_grammar(
    form: ToolFormat | None,
    choice: ToolChoice,
    marks: Marks,
    *,
    parallel: bool,
    think: ReasoningFormat | None = None,
    answer: str | None = None,
) -> str:
    """Lark for outputs with these calls. Raises `InvalidRequest` for what cannot be enforced.

    Where no call must be made, calls stand in free text, or, with `answer`, the output is calls alone or JSON of that
    schema. `think`: a block of reasoning may come first. `form` None is Harmony.
    """
    rules: list[str] = []
    if form is None:
        body = _harmony(choice, marks, rules, answer)
    else:
        _calls(form, choice, marks, rules)
        rules.append(f"further: ({_either('next', choice)})*" if parallel else 'further: ""')
        rules.append(f"more: further {marks.terms(form.rendered_all[2])}")
        rules.append(f"calls: ({_either('first', choice)}) more")
        body = "LEAD? calls"
        if answer is not None:
            body = f"LEAD? (calls | %json {answer})"
        elif not choice.must_call:
            body = _in_text(form, choice, marks, rules)
    lines = [f"start: {_thinking(think, marks, rules)} {body}", *rules, r"LEAD: /\n{1,4}/"]
    return "\n".join(lines) + "\n"


def places(choice: ToolChoice, answer: str) -> dict[str, str]:
    """What a client calls the schemas in `calls_grammar`, that of its answer `answer`, by the names of their rules."""
    found = {"start": answer}
    for index, tool in enumerate(choice.tools):
        where = f"tools/{tool.name}/parameters"
        found |= {f"rest_{index}": where, f"call_{index}": where}
        for number, name in enumerate(_ordered(tool)):
            found[f"arg_{index}_{number}"] = f"{where}/properties/{name}"
    return found


def _ordered(tool: Tool) -> list[str]:
    """The names of a tool's parameters, the required ones first, in their order."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    required = [name for name in tool.parameters.get("required") or () if name in properties]
    return [*required, *(name for name in properties if name not in required)]


def _either(rule: str, choice: ToolChoice) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(len(choice.tools)))


def _calls(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> None:
    """For each tool: the first call, a further one, and what follows their beginnings.

    All that stands before the arguments is one text, so that what may follow a call is told apart by its first
    different character.
    """
    all_before, between, _ = form.rendered_all
    for index, tool in enumerate(choice.tools):
        before, behind = form.rendered(tool.name)
        enforced = choice.must_call or tool.strict
        python = form.arguments == "python"
        arguments = (
            _python(tool, index, rules, enforced=enforced) if python else _json(tool, enforced=enforced)
        )
        rules.append(f"rest_{index}: {arguments} {marks.terms(behind)}")
        rules.append(f"first_{index}: {marks.terms(all_before + before)} rest_{index}")
        rules.append(f"next_{index}: {marks.terms(between + before)} rest_{index}")
    if form.arguments == "python" and not all(choice.must_call or tool.strict for tool in choice.tools):
        rules.append(_ANY_PYTHON)


def _json(tool: Tool, *, enforced: bool) -> str:
    schema = {**_ANY_OBJECT, **tool.parameters} if enforced else _ANY_OBJECT
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def _python(tool: Tool, index: int, rules: list[str], *, enforced: bool) -> str:
    """key=value, ...: the required ones in their order, then those of the others that are wanted."""
    if not enforced:
        return "any_arguments"
    schema = tool.parameters
    if strange := sorted(schema.keys() - _PLAIN_KEYS):
        raise InvalidRequest(
            f"tools: {strange[0]!r} beside the properties of {tool.name!r} cannot be enforced for this model.",
            param="tools",
        )
    properties: Mapping[str, Any] = schema.get("properties") or {}
    ordered = _ordered(tool)
    required = [name for name in ordered if name in (schema.get("required") or ())]
    optional = ordered[len(required) :]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for number, name in enumerate(ordered):
        value = properties[name] if isinstance(properties[name], dict) else {}
        text = json.dumps({**shared, **value, "x-guidance": _STYLE})
        rules.append(f"arg_{index}_{number}: {json.dumps(name + '=')} %json {text}")
    terms = [f"arg_{index}_{number}" for number in range(len(required))]
    body = ' ", " '.join(terms)
    if not optional:
        return body
    later = [f"arg_{index}_{number}" for number in range(len(required), len(required) + len(optional))]
    if required:
        return body + " " + " ".join(f'(", " {term})?' for term in later)
    # Without required ones any may be the first.
    starts = [
        " ".join([term, *(f'(", " {further})?' for further in later[number + 1 :])])
        for number, term in enumerate(later)
    ]
    return "(" + " | ".join(starts) + ")?"


def _harmony(choice: ToolChoice, marks: Marks, rules: list[str], answer: str | None) -> str:
    """Thoughts if the model has any, then one call or the final answer. Where neither must be, all messages are free
    but for the calls."""
    turn = f'{marks.terms("<|end|><|start|>")} "assistant"'
    rules.append(f"thought: {marks.terms('<|channel|>analysis<|message|>')} ANYTHING {turn}")
    rules.append(r"ANYTHING: /(?s:.*)/")
    if not choice.tools:
        return f"thought? {marks.terms(_HARMONY_FINAL)} %json {answer}"
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(choice.tools))))
    for index, tool in enumerate(choice.tools):
        before = f"{HARMONY_CALL[0]}{tool.name}{HARMONY_CALL[1]}"
        arguments = _json(tool, enforced=choice.must_call or tool.strict)
        rules.append(f"call_{index}: {marks.terms(before)} {arguments}")
    if choice.must_call:
        return "thought? call"
    if answer is not None:
        return f"thought? (call | {marks.terms(_HARMONY_FINAL)} %json {answer})"
    if "<|channel|>" not in marks.ids or "<|message|>" not in marks.ids:
        raise InvalidRequest(
            'Strict tools need Harmony\'s marks to be tokens of this model; use tool_choice "required".',
            param="tools",
        )
    channel, body = marks.terms("<|channel|>"), marks.terms("<|message|>")
    rules.append(f'message: {channel} ("analysis" | "commentary" | "final") {body} ANYTHING | call')
    return f"message ({turn} message)*"


def _in_text(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Free text in which calls are held to their schemas once they have begun.

    Where a token alone begins a call, text ends there. Elsewhere the text up to a call's beginning is a lazy lexeme: it
    ends with the first such beginning, from which on only a call is allowed.
    """
    openers = form.section_open + form.call_open
    if form.arguments == "python" and "[" in form.call_open:
        return _in_python_text(form, choice, marks, rules)
    begins = [_escaped(mark) for mark in openers if mark not in form.vague]
    begins += [rf"{_escaped(mark)}\s*\[?\s*\{{" for mark in form.vague]
    if form.bare:
        rules.append(r"FREE: /[^\s{\[](?s:.*)/" + _without(begins))
        return "LEAD? (calls | FREE)"
    rules.append("FREE: /(?s:.*)/" + _without(begins))
    return f"({_from_mark(form, choice, marks, rules)})* FREE"


def _in_python_text(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Where a list begins with the name of a tool and a parenthesis, a call does; a bracket alone is text."""
    names = "|".join(_escaped(tool.name) for tool in choice.tools)
    text = r"(\s*[^\s{](?s:.*))?\s*" if form.bare else "(?s:.*)"  # a brace begins calls as JSON there
    rules.append(f"FREE: /{text}/" + _without([rf"\[\s*({names})\("]))
    rules.append('listed: further "]"')
    ways: list[str] = []
    for index, tool in enumerate(choice.tools):
        rules.append(rf"until_{index}[lazy]: /{text}\[\s*{_escaped(tool.name)}\(/")
        ways.append(f"until_{index} rest_{index} listed")
    if any(form.rendered_all[0].startswith(mark) for mark in marks.ids):
        ways.append("FREE calls")
    return f"({' | '.join(ways)})* FREE"


def _from_mark(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Text and the calls behind it, where the format's own mark begins them."""
    begins = [form.rendered_all[0] + form.rendered(tool.name)[0] for tool in choice.tools]
    mark = next(mark for mark in form.section_open + form.call_open if begins[0].startswith(mark))
    if mark in marks.ids:
        return "FREE calls"
    head = marks.head(mark)
    if head == mark:
        rules.append(f"until[lazy]: /(?s:.*){_escaped(head)}/")
    else:  # it holds a token, where text ends
        rules.append(f"until: /(?s:.*){_escaped(head)}/")
    firsts = [f"{marks.terms(begin[len(head) :])} rest_{index}" for index, begin in enumerate(begins)]
    return f"until ({' | '.join(firsts)}) more"


def _escaped(text: str) -> str:
    """As a regular expression of Lark's."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _without(found: Sequence[str]) -> str:
    """Lark for "and nothing in it that matches one of these expressions"."""
    return f" & ~/(?s:.*)({'|'.join(dict.fromkeys(found))})(?s:.*)/" if found else ""


def _thinking(think: ReasoningFormat | None, marks: Marks, rules: list[str]) -> str:
    if think is None:
        return ""
    close = think.close.strip()
    if close not in marks.ids:
        return ""  # then it has to begin with its answer
    rules.append(f"think: {marks.terms(think.open.strip())} THOUGHT {marks.terms(close)}")
    rules.append("THOUGHT: /(?s:.*)/" + _without([_escaped(close)]))
    return "think?"
