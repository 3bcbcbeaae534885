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
from serve.chat.reasoning.format import ReasoningFormat
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

HARMONY_CALL = ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")


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
    """Lark for outputs with these calls. Raises `InvalidRequest` where the format cannot be enforced.

    Where no call must be made, calls stand in free text, or, with `answer`, the output is calls alone or JSON of that
    schema. `think`: a block of reasoning may come first. `form` None is Harmony.
    """
    rules: list[str] = []
    if form is None:
        calls = _harmony(choice.tools, marks, rules)
    else:
        if form.rendered is None:
            raise _unable(choice)
        before, between, behind = (marks.terms(text) for text in form.rendered_all)
        more = f"({between} call)*" if parallel else ""
        rules.append(f"calls: {before} call {more} {behind}")
        _calls(form, choice, marks, rules)
        calls = "calls"
    body = f"LEAD? {calls}"
    if answer is not None:
        body = f"LEAD? ({calls} | %json {answer})"
    elif not choice.must_call:
        body = _in_text(form, choice, marks, rules)
    lines = [f"start: {_thinking(think, marks, rules)} {body}", *rules, r"LEAD: /\n{1,4}/"]
    return "\n".join(lines) + "\n"


def _calls(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> None:
    """A rule for a call, and one for each tool's."""
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(choice.tools))))
    for index, tool in enumerate(choice.tools):
        before, behind = form.rendered(tool.name) if form.rendered else ("", "")
        enforced = choice.must_call or tool.strict
        arguments = (
            _python(tool, index, rules) if form.arguments == "python" else _json(tool, enforced=enforced)
        )
        rules.append(f"call_{index}: {marks.terms(before)} {arguments} {marks.terms(behind)}")


def _json(tool: Tool, *, enforced: bool) -> str:
    schema = {**_ANY_OBJECT, **tool.parameters} if enforced else _ANY_OBJECT
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def _python(tool: Tool, index: int, rules: list[str]) -> str:
    """key=value, ...: the required ones in their order, then those of the others that are wanted."""
    schema = tool.parameters
    if strange := sorted(schema.keys() - _PLAIN_KEYS):
        raise InvalidRequest(
            f"tools: {strange[0]!r} beside the properties of {tool.name!r} cannot be enforced for this model.",
            param="tools",
        )
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in properties]
    optional = [name for name in properties if name not in required]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for number, name in enumerate([*required, *optional]):
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
        " ".join([term, *(f'(", " {further})?' for further in later[place + 1 :])])
        for place, term in enumerate(later)
    ]
    return "(" + " | ".join(starts) + ")?"


def _harmony(tools: Sequence[Tool], marks: Marks, rules: list[str]) -> str:
    """One call on the commentary channel, after thoughts if the model has any; the end of the turn follows."""
    rules.append(
        f"calls: ({marks.terms('<|channel|>analysis<|message|>')} ANYTHING {marks.terms('<|end|><|start|>')} "
        f'"assistant")? call'
    )
    rules.append(r"ANYTHING: /(?s:.*)/")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        before = f"{HARMONY_CALL[0]}{tool.name}{HARMONY_CALL[1]}"
        rules.append(f"call_{index}: {marks.terms(before)} {_json(tool, enforced=True)}")
    return "calls"


def _in_text(form: ToolFormat | None, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Free text in which calls are held to their schemas once they have begun."""
    if form is None:
        raise _unable(choice)
    openers = tuple(dict.fromkeys(form.section_open + form.call_open))
    if form.bare:
        rules.append(r"FREE: /[^\s{\[](?s:.*)/" + _without(openers))
        return "(LEAD? calls | FREE)"
    begin = form.rendered_all[0] or (form.rendered(choice.tools[0].name)[0] if form.rendered else "")
    if not any(begin.startswith(mark) for mark in marks.ids):
        raise _unable(choice)  # text cannot be told from the beginning of a call
    rules.append("FREE: /(?s:.*)/" + _without(openers))
    return "FREE (calls FREE)*"


def _without(texts: Sequence[str]) -> str:
    """Lark for "and none of these in it"."""
    found = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
    return f" & ~/(?s:.*)({found})(?s:.*)/" if texts else ""


def _thinking(think: ReasoningFormat | None, marks: Marks, rules: list[str]) -> str:
    if think is None:
        return ""
    close = think.close.strip()
    if close not in marks.ids:
        return ""  # then it has to begin with its answer
    rules.append(f"think: {marks.terms(think.open.strip())} THOUGHT {marks.terms(close)}")
    rules.append("THOUGHT: /(?s:.*)/" + _without((close,)))
    return "think?"


def _unable(choice: ToolChoice) -> InvalidRequest:
    if choice.must_call:
        return InvalidRequest(
            'Calls cannot be enforced in the format of this model; use tool_choice "auto".',
            param="tool_choice",
        )
    return InvalidRequest(
        'Strict tools cannot be enforced beside text in the format of this model; use tool_choice "required", or '
        "leave strict out.",
        param="tools",
    )
