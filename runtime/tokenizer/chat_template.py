"""Chat templates: from messages to a prompt's text, in jinja2's sandbox, as transformers renders them."""

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

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_FOREIGN = (  # what a template's own mistakes raise on data it does not expect
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
LOOP_SECONDS = 0.01  # of rendering on an event loop, which answers nobody meanwhile


class ChatTemplate:
    """A compiled template. Rendering is pure, and bounded in time and memory.

    On an event loop it raises `TakesLong` after some milliseconds; in another thread it has its whole time.

    `sources` are jinja texts by name: "default", and perhaps "tool_use" for requests with tools. `special`
    are the tokenizer's special tokens, which templates use by name. Raises ConfigurationError when a text is
    no jinja.
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
                raise ConfigurationError(f"The chat template {name!r} is no valid jinja: {error}.") from error

    @property
    def source(self) -> str:
        """The jinja text that chats without tools are rendered with."""
        return self._sources[self._name(False)]

    def mentions(self, text: str) -> bool:
        """Whether the text stands in a template."""
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
        """The prompt's text. `kwargs` are further variables of the template.

        With `continue_final_message` the text ends where the last message ends, and there is no generation
        prompt. `check` sees the parts of the text before they are joined, which holds the interpreter, and raises what
        it wants. Raises InvalidRequest for messages that are malformed or that the template refuses.
        """
        name = self._name(bool(tools))
        taken = _OURS.intersection(kwargs)
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {min(taken)}.", param="chat_template_kwargs"
            )
        variables = {**self._special, "documents": None, **kwargs}
        failure: _CannotRender | None = None
        for prepared, offered in self._readings(name, messages, tools):
            given = {**variables, "messages": prepared, "tools": offered}
            try:
                if continue_final_message:
                    parts = self._continued(name, prepared, given)
                else:
                    parts = self._render(name, {**given, "add_generation_prompt": add_generation_prompt})
            except _CannotRender as error:
                if _on_loop():
                    raise TakesLong(error.message, param="messages") from error  # the other ways take time
                failure = failure or error
                continue
            if check is not None:
                check(parts)
            return "".join(parts)
        raise failure or _CannotRender()

    def _readings(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
        """Messages and tools as the template seems to want them; then in the other ways in which it may.

        What a template wants is guessed from its text, and some fail for what they do not expect.
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
        """The parts of the text."""
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
        except _FOREIGN as error:
            raise _CannotRender from error

    def _continued(self, name: str, prepared: list[dict[str, Any]], variables: dict[str, Any]) -> list[str]:
        """Mark the end of the last message, render, and cut at the mark. The parts of the text."""
        end = _mark_end(prepared[-1]).strip()
        parts = self._render(name, {**variables, "add_generation_prompt": False})
        mark = _CONTINUE.strip()
        marked = next((index for index in reversed(range(len(parts))) if mark in parts[index]), None)
        # Most write the message as a part of its own; looking through all that is long holds the interpreter.
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
            # A template that trims messages has trimmed the mark's space: then the message's own goes too.
            while kept and not kept[-1].rstrip():
                kept.pop()
            kept[-1:] = [text.rstrip() for text in kept[-1:]]
        return kept


def load_template(
    choice: str | None, own: Mapping[str, str], special: Mapping[str, str]
) -> ChatTemplate | None:
    """The template that was chosen, a file or a name of ours, else the tokenizer's own, else None.

    Raises ConfigurationError for a choice that is neither.
    """
    if choice is None:
        return ChatTemplate(own, special) if own else None
    if (named := chat_template_named(choice)) is not None:
        return ChatTemplate({"default": named}, special)
    try:
        source = Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {choice} cannot be read: {error}.") from error
    # Templates copied out of JSON carry their line breaks escaped.
    return ChatTemplate({"default": source.strip("\n").replace("\\n", "\n")}, special)


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the message's text; returns the text without it."""
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
    """A template's own mistake, on data that it does not expect."""

    def __init__(self) -> None:
        super().__init__("The chat template cannot render these messages.", param="messages")


class _Refusal(jinja2.TemplateError):
    """raise_exception was called in a template."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason[:1000]


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the library

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A namespace that stores no names of Python's internals."""

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
    """Whether this thread runs an event loop, which waits for us."""
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
    """`dict` for templates, without the class itself."""

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
    """JSON without jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
