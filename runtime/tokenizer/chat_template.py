"""Render chat templates: turn messages into a prompt's text, in jinja2's sandbox as transformers does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.utils import Namespace

from runtime.config.chat_templates import chat_template_named
from runtime.errors import ConfigurationError, InvalidRequest, TakesLong
from runtime.tokenizer.messages import Accepts, accepted_content, asks_for_none, prepare_messages, whole_tool
from runtime.tokenizer.template_costs import TemplateLimit
from runtime.tokenizer.template_limits import MAX_BYTES, MAX_SECONDS, MeteredEnvironment, metered

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # mark at the end of the message that the model continues
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})  # variables that only Penstock sets
_TEMPLATE_ERRORS = (  # exceptions that templates raise for unexpected data
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
LOOP_SECONDS = 0.01  # maximum rendering time in a thread with an event loop, because rendering blocks the loop


class ChatTemplate:
    """A compiled chat template. Rendering has no side effects, and is bounded in time and memory.

    In a thread with an event loop, rendering raises `TakesLong` after `LOOP_SECONDS`. In other threads it may take
    `MAX_SECONDS`.

    `sources` maps names to jinja texts: "default" and, if the tokenizer has it, "tool_use" for requests with tools.
    `special` maps names in templates, for example "bos_token", to special tokens. Raises ConfigurationError if a source
    is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        if not sources:
            raise ConfigurationError("There is no chat template to compile.")
        environment = _environment()
        self._special = dict(special)
        self._sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}
        self._accepts: dict[str, Accepts] = {}
        self._asks_for_none: set[str] = set()
        for name, source in sources.items():
            try:
                tree = environment.parse(source)
                self._accepts[name] = accepted_content(tree)
                if asks_for_none(tree):
                    self._asks_for_none.add(name)
                self._compiled[name] = environment.from_string(tree)
            except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
                raise ConfigurationError(f"The chat template {name!r} is not valid jinja: {error}.") from error

    @property
    def source(self) -> str:
        """The jinja source that is used for chats without tools."""
        return self._sources[self._name(False)]

    def mentions(self, text: str) -> bool:
        """Whether any of the jinja sources contains the text."""
        return any(text in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[Sequence[str]], None] | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text. `kwargs` are further variables of the template.

        With `continue_final_message`, the text ends at the end of the last message, without a generation prompt.
        `check` is called with the parts of the text before they are joined. It may raise an error to refuse a long text
        early, because joining holds the GIL. Raises InvalidRequest if messages are malformed or the template refuses
        them.
        """
        name = self._name(bool(tools))
        taken = _OURS.intersection(kwargs)
        if taken:
            raise InvalidRequest(f"chat_template_kwargs may not set {min(taken)}.", param="chat_template_kwargs")
        variables = {**self._special, "documents": None, **kwargs}
        failure: _CannotRender | None = None
        for prepared, offered in self._readings(name, messages, tools):
            context = {**variables, "messages": prepared, "tools": offered}
            try:
                if continue_final_message:
                    parts = self._continued(name, prepared, context)
                else:
                    parts = self._render(name, {**context, "add_generation_prompt": add_generation_prompt})
            except _CannotRender as error:
                if _on_loop():
                    raise TakesLong(error.message, param="messages") from error  # the caller renders again in a thread
                failure = failure or error
                continue
            if check is not None:
                check(parts)
            return "".join(parts)
        raise failure or _CannotRender()

    def _readings(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
        """Yield (messages, tools) in several forms, to be tried until the template can render one.

        The first form is guessed from the template's source.
        """
        accepts, none_with_calls = self._accepts[name], name in self._asks_for_none
        offered = None if tools is None else [dict(tool) for tool in tools]
        ways: list[tuple[Accepts, bool]] = [(accepts, none_with_calls), (accepts, not none_with_calls)]
        if accepts != "string":
            ways.append(("string", none_with_calls))
        seen: list[Any] = []
        for way, none in ways:
            prepared = prepare_messages(messages, way, none_with_calls=none)
            if prepared not in seen:
                seen.append(prepared)
                yield prepared, offered
        whole = None if offered is None else [whole_tool(tool) for tool in offered]
        if whole != offered:
            yield prepare_messages(messages, accepts, none_with_calls=none_with_calls), whole

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self._compiled:
            return "tool_use"
        return "default" if "default" in self._compiled else next(iter(self._compiled))

    def _render(self, name: str, variables: Mapping[str, Any]) -> list[str]:
        """Render the template, and return the text in parts."""
        template, on_loop = self._compiled[name], _on_loop()
        try:
            with metered(LOOP_SECONDS if on_loop else MAX_SECONDS):
                return list(template.root_render_func(template.new_context(dict(variables))))
        except (TemplateLimit, MemoryError) as limit:
            kind = TakesLong if on_loop else InvalidRequest
            raise kind(
                f"The chat template would take more than {MAX_SECONDS:g} s or {MAX_BYTES >> 20} MiB "
                "for these messages.",
                param="messages",
            ) from limit
        except _Refusal as refusal:
            raise InvalidRequest(
                f"The chat template refuses these messages: {refusal.reason}", param="messages"
            ) from refusal
        except _TEMPLATE_ERRORS as error:
            raise _CannotRender from error

    def _continued(self, name: str, prepared: list[dict[str, Any]], variables: dict[str, Any]) -> list[str]:
        """Append a mark to the last message, render, and return the parts of the text before the mark."""
        end = _mark_end(prepared[-1]).strip()
        parts = self._render(name, {**variables, "add_generation_prompt": False})
        mark = _CONTINUE.strip()
        marked = next((index for index in reversed(range(len(parts))) if mark in parts[index]), None)
        # Most templates write the message as a separate part. A search in the whole text would hold the GIL.
        if marked is None or end not in parts[marked]:
            parts, marked = ["".join(parts)], 0
        last = parts[marked]
        if mark not in last or end not in last:
            raise InvalidRequest(
                "The chat template leaves the final message out, so it cannot be continued.", param="messages"
            )
        end_index = last.rindex(mark)
        kept = [*parts[:marked], last[:end_index]]
        if not "".join([last[end_index:], *parts[marked + 1 :]]).startswith(_CONTINUE):
            # The mark has lost its final space, so the template trims messages. Trim the message here too.
            while kept and not kept[-1].rstrip():
                kept.pop()
            kept[-1:] = [text.rstrip() for text in kept[-1:]]
        return kept


def load_template(
    choice: str | None, tokenizer_templates: Mapping[str, str], special: Mapping[str, str]
) -> ChatTemplate | None:
    """Return the template that `choice` names: the path of a file, or the name of a built-in template.

    If `choice` is None, return the tokenizer's template, or None if the tokenizer has none. Raises ConfigurationError
    if `choice` is neither a readable file nor a built-in name.
    """
    if choice is None:
        return ChatTemplate(tokenizer_templates, special) if tokenizer_templates else None
    if (named := chat_template_named(choice)) is not None:
        return ChatTemplate({"default": named}, special)
    try:
        source = Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {choice} cannot be read: {error}.") from error
    # A template copied from a JSON file has \\n instead of line breaks.
    return ChatTemplate({"default": source.strip("\n").replace("\\n", "\n")}, special)


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the message's text, and return the text without the mark."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return content
    for part in reversed(content or []):
        if isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _CONTINUE
            return text
    raise InvalidRequest("The final message has no text to continue.", param="messages")


class _CannotRender(InvalidRequest):
    """Raised if a template fails, for example on data that it does not expect."""

    def __init__(self) -> None:
        super().__init__("The chat template cannot render these messages.", param="messages")


class _Refusal(jinja2.TemplateError):
    """Raised if a template calls raise_exception."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason[:1000]


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's text for training. Here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the library

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A namespace that refuses names with a leading underscore (Python's internals)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` must work
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _on_loop() -> bool:
    """Whether this thread runs an event loop, which rendering would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _environment() -> jinja2.Environment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = _Dict()
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:1000])


class _Dict:
    """Replacement for `dict` in templates that gives no access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text without the HTML escapes of jinja's own `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
