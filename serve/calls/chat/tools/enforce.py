"""Enforce required calls and calls to strict tools with a grammar in llguidance's dialect of Lark.

The grammar describes the model's own call format and constrains the arguments by each tool's JSON schema. For formats
that write parameters between tags, the grammar requires one JSON object instead, which their readers also accept. For
tools without an enforced schema, any text is allowed up to the end of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from serve.calls.chat.reasoning import ReasoningFormat
from serve.calls.chat.tools.choice import ToolChoice
from serve.calls.chat.tools.format import ToolFormat
from serve.calls.chat.tools.offered import Tool

# The JSON style that models are trained on. White space is fixed, so that sampling cannot produce it endlessly.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLAIN_KEYS = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
    "$schema",
}  # fmt: skip
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")  # special characters of regular expressions
_ANY_OBJECT = {"type": "object"}
# Rules for the arguments of a call in Python syntax without an enforced schema.
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
    """Token ids of the marks that llguidance matches as tokens, not as text.

    These are special tokens, and added tokens such as <tool_call>.
    """

    ids: Mapping[str, int]

    def terms(self, text: str) -> str:
        """Return the text as a sequence of Lark terms: token ids for the marks in it, and strings."""
        marks = [mark for mark in self.ids if mark in text]
        if not marks:
            return json.dumps(text, ensure_ascii=False) if text else ""
        pieces = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
        return " ".join(self._term(piece) for piece in pieces if piece)

    def head(self, text: str) -> str:
        """Return the part of the text before its first mark, or the whole text if it has no mark."""
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
    """Return Lark rules for outputs with calls to the tools of `choice`, in the format `form` (None: Harmony).

    If no call is required and `answer` is None, calls may occur in free text. If `answer` is a JSON schema, the output
    is either calls or JSON of this schema. If `think` is set, a reasoning block may come first. Raises `InvalidRequest`
    for constraints that cannot be enforced.
    """
    rules: list[str] = []
    if form is None:
        body = _harmony(choice, marks, rules, answer)
    else:
        _calls(form, choice, marks, rules)
        _sequence_of_calls(form, choice, marks, rules, parallel=parallel)
        body = "LEAD? calls"
        if answer is not None:
            body = f"LEAD? (calls | %json {answer})"
        elif not choice.must_call:
            body = _in_text(form, choice, marks, rules)
    lines = [f"start: {_thinking(think, marks, rules)} {body}", *rules, r"LEAD: /\n{1,4}/"]
    return "\n".join(lines) + "\n"


def names_grammar(
    form: ToolFormat | None, choice: ToolChoice, marks: Marks, *, parallel: bool
) -> tuple[str, str] | None:
    """Return the mark that begins a call, and Lark rules for the output after this mark.

    The rules allow calls that name tools of the request, and free text. Returns None for formats whose readers already
    accept only these names. `form` is None for Harmony.
    """
    if form is None:
        return _harmony_names(choice, marks)
    begins = [form.rendered_all[0] + _before(form, tool, choice) for tool in choice.tools]
    mark = next((mark for mark in form.section_open + form.call_open if begins[0].startswith(mark)), None)
    if mark is None or mark in form.vague or form.bare or mark == "[":
        return None
    rules: list[str] = []
    _calls(form, choice, marks, rules)
    _sequence_of_calls(form, choice, marks, rules, parallel=parallel)
    text = _in_text(form, choice, marks, rules)
    firsts = [f"{marks.terms(begin[len(mark) :])} rest_{index}" for index, begin in enumerate(begins)]
    return mark, "\n".join([f"start: ({' | '.join(firsts)}) more {text}", *rules, ""])


def schema_paths(choice: ToolChoice, answer: str) -> dict[str, str]:
    """Map each rule of `calls_grammar` that enforces a JSON schema to the path of this schema in the request.

    `answer` is the path of the schema for an answer without calls.
    """
    paths = {"start": answer}
    for index, tool in enumerate(choice.tools):
        path = f"tools/{tool.name}/parameters"
        paths |= {f"rest_{index}": path, f"call_{index}": path}
        for number, name in enumerate(_ordered(tool)):
            paths[f"arg_{index}_{number}"] = f"{path}/properties/{name}"
    return paths


def _ordered(tool: Tool) -> list[str]:
    """Return the names of a tool's parameters in the schema's order, with the required parameters first."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    required = [name for name in tool.parameters.get("required") or () if name in properties]
    return [*required, *(name for name in properties if name not in required)]


def _either(rule: str, choice: ToolChoice) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(len(choice.tools)))


def _sequence_of_calls(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str], *, parallel: bool) -> None:
    rules.append(f"further: ({_either('next', choice)})*" if parallel else 'further: ""')
    rules.append(f"more: further {marks.terms(form.rendered_all[2])}")
    rules.append(f"calls: ({_either('first', choice)}) more")


def _calls(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> None:
    """Append three rules for each tool: `first` (a first call), `next` (a later call), `rest` (the end of a call).

    The text before the arguments is one lexeme, so that after a call the lexer chooses between the alternatives at the
    first character in which they differ.
    """
    all_before, between, _ = form.rendered_all
    for index, tool in enumerate(choice.tools):
        before, after = _before(form, tool, choice), form.rendered(tool.name)[1]
        enforced = choice.must_call or tool.strict
        if form.arguments == "tags" and not enforced:
            rules.append(f"rest_{index}: free_rest")
        else:
            python = form.arguments == "python"
            arguments = _python(tool, index, rules, enforced=enforced) if python else _json(tool, enforced=enforced)
            rules.append(f"rest_{index}: {arguments} {marks.terms(after)}")
        rules.append(f"first_{index}: {marks.terms(all_before + before)} rest_{index}")
        rules.append(f"next_{index}: {marks.terms(between + before)} rest_{index}")
    if form.arguments != "json" and not all(choice.must_call or tool.strict for tool in choice.tools):
        rules.extend([_ANY_PYTHON] if form.arguments == "python" else _free_rest(form, marks))


def _before(form: ToolFormat, tool: Tool, choice: ToolChoice) -> str:
    """Return the text before a call's arguments, without white space at its end if the arguments are free text."""
    before = form.rendered(tool.name)[0]
    is_free = form.arguments == "tags" and not (choice.must_call or tool.strict)
    return before.rstrip() if is_free else before


def _free_rest(form: ToolFormat, marks: Marks) -> list[str]:
    """Return rules for any text up to the end of a call. The first character must not extend the call's name."""
    before, after = form.rendered("name")
    end = after.index(">") + 1
    close, rest = after[:end].strip(), marks.terms(after[end:])
    first = r"[^A-Za-z0-9_.:\/-](?s:.*)" if before.rstrip().endswith("name") else "(?s:.+)"
    rules = [f"FREE_FIRST: /{first}/", "FREE_NEXT: /(?s:.+)/"]
    head = marks.head(close)
    inner = [marks.terms(mark) for mark in form.shown if mark in marks.ids]
    between = f"FREE_FIRST? (({' | '.join(inner)}) FREE_NEXT?)*" if inner else "FREE_FIRST?"
    if close in marks.ids:
        return [*rules, f"free_rest: {between} {marks.terms(close)} {rest}"]
    if head == close:
        until = f"({first})?{_escaped(close)}"
        return [*rules, f"until_close[lazy]: /{until}/", f"free_rest: until_close {rest}"]
    # The closing mark contains a token that the marks of parameters also contain.
    token = next(mark for mark in marks.ids if close.startswith(mark, len(head)))
    tail = close[len(head) + len(token) :]
    return [
        *rules,
        f"FREE_TAIL: /(?s:.+)/ & ~/{_escaped(tail)}(?s:.*)/",
        f"free_rest: FREE_FIRST ({marks.terms(token)} FREE_TAIL)* {marks.terms(token + tail)} {rest}",
    ]


def _json(tool: Tool, *, enforced: bool) -> str:
    schema = {**_ANY_OBJECT, **tool.parameters} if enforced else _ANY_OBJECT
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def _python(tool: Tool, index: int, rules: list[str], *, enforced: bool) -> str:
    """Append rules for arguments in Python syntax, and return the Lark expression for "key=value, ...".

    The required parameters come first, then any of the optional parameters, both in the schema's order.
    """
    if not enforced:
        return "any_arguments"
    schema = tool.parameters
    if unsupported := sorted(schema.keys() - _PLAIN_KEYS):
        raise InvalidRequest(
            f"tools: {unsupported[0]!r} in the parameters of {tool.name!r} cannot be enforced for this model.",
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
    # No parameter is required, so any of them may come first.
    starts = [
        " ".join([term, *(f'(", " {further})?' for further in later[number + 1 :])])
        for number, term in enumerate(later)
    ]
    return "(" + " | ".join(starts) + ")?"


def _harmony(choice: ToolChoice, marks: Marks, rules: list[str], answer: str | None) -> str:
    """Append rules for Harmony. Return the Lark expression for optional reasoning, then one call or the final answer.

    If neither a call nor an answer schema is required, only calls are constrained, and other messages have any text.
    """
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


def _harmony_names(choice: ToolChoice, marks: Marks) -> tuple[str, str] | None:
    """Return the mark and rules of `names_grammar` for Harmony, or None if its marks are not tokens of the model."""
    if "<|channel|>" not in marks.ids or "<|message|>" not in marks.ids:
        return None
    rules: list[str] = []
    messages = _harmony(choice, marks, rules, None)
    named = " | ".join(f"{json.dumps(tool.name)} rest_{index}" for index, tool in enumerate(choice.tools))
    constrain = f"({marks.terms('<|constrain|>')})? " if "<|constrain|>" in marks.ids else ""
    for index, tool in enumerate(choice.tools):
        body = _json(tool, enforced=choice.must_call or tool.strict)
        rules.append(f'rest_{index}: " "? {constrain}"json"? {marks.terms("<|message|>")} {body}')
    further = messages.removeprefix("message ")
    return HARMONY_CALL[0], "\n".join([f"start: ({named}) {further}", *rules, ""])


def _in_text(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Append rules, and return the Lark expression for free text in which text that begins like a call must be a call.

    If calls begin with a single token, free text ends at this token. Otherwise a lazy lexeme matches the text up to and
    including the first beginning of a call, and only the rest of a call may follow.
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
    """Append rules, and return the Lark expression for free text with lists of calls in Python syntax.

    A bracket begins a call only if a tool's name and a parenthesis follow.
    """
    names = "|".join(_escaped(tool.name) for tool in choice.tools)
    # In formats whose calls need no opening mark, a brace begins a call in JSON.
    text = r"(\s*[^\s{](?s:.*))?\s*" if form.bare else "(?s:.*)"
    rules.append(f"FREE: /{text}/" + _without([rf"\[\s*({names})\("]))
    rules.append('listed: further "]"')
    alternatives: list[str] = []
    for index, tool in enumerate(choice.tools):
        rules.append(rf"until_{index}[lazy]: /{text}\[\s*{_escaped(tool.name)}\(/")
        alternatives.append(f"until_{index} rest_{index} listed")
    if any(form.rendered_all[0].startswith(mark) for mark in marks.ids):
        alternatives.append("FREE calls")
    return f"({' | '.join(alternatives)})* FREE"


def _from_mark(form: ToolFormat, choice: ToolChoice, marks: Marks, rules: list[str]) -> str:
    """Append rules, and return the Lark expression for free text up to an opening mark, followed by calls."""
    begins = [form.rendered_all[0] + _before(form, tool, choice) for tool in choice.tools]
    mark = next(mark for mark in form.section_open + form.call_open if begins[0].startswith(mark))
    if mark in marks.ids:
        return "FREE calls"
    head = marks.head(mark)
    if head == mark:
        rules.append(f"until[lazy]: /(?s:.*){_escaped(head)}/")
    else:  # a special token within the mark ends the text
        rules.append(f"until: /(?s:.*){_escaped(head)}/")
    firsts = [f"{marks.terms(begin[len(head) :])} rest_{index}" for index, begin in enumerate(begins)]
    return f"until ({' | '.join(firsts)}) more"


def _escaped(text: str) -> str:
    """Escape the text for a Lark regular expression."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _without(expressions: Sequence[str]) -> str:
    """Return the Lark suffix that excludes texts with a match of these expressions from a regular expression."""
    return f" & ~/(?s:.*)({'|'.join(dict.fromkeys(expressions))})(?s:.*)/" if expressions else ""


def _thinking(think: ReasoningFormat | None, marks: Marks, rules: list[str]) -> str:
    if think is None:
        return ""
    close = think.close.strip()
    if close not in marks.ids:
        return ""  # allow no reasoning block, because its closing mark is not a single token
    rules.append(f"think: {marks.terms(think.open.strip())} THOUGHT {marks.terms(close)}")
    rules.append("THOUGHT: /(?s:.*)/" + _without([_escaped(close)]))
    return "think?"
