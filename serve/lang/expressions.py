"""The expressions of programs: texts, `gen`, `select` and roles. They are values, which a program's state runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.errors import InvalidRequest
from serve.python.generation import Method
from serve.python.sampling import own_name

Role = Literal["system", "user", "assistant"]
# Values of `dtype` -> regular expressions, as in SGLang.
PATTERNS: Mapping[type, str] = {
    int: r"[-+]?[0-9]+",
    float: r"[-+]?[0-9]*\.?[0-9]+",
    bool: r"(True|False)",
    str: r"\"[^\"\n]*\"",
}


class Expression:
    """A part of a program's text. Parts are joined with `+`."""

    def __add__(self, other: Expression | str) -> Parts:
        return Parts((*_parts(self), *_parts(other)))

    def __radd__(self, other: str) -> Parts:
        return Parts((*_parts(other), *_parts(self)))


@dataclass(frozen=True, slots=True)
class Parts(Expression):
    """Several parts in sequence."""

    parts: tuple[Expression | str, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Text that the model generates."""

    name: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of the request
    n: int = 1


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """The choice of the likeliest of several texts."""

    name: str | None
    choices: tuple[str, ...]
    method: Method = "token_length_normalized"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """The beginning of a message."""

    role: Role


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    """The end of a message."""

    role: Role


def _parts(value: Expression | str | None) -> tuple[Expression | str, ...]:
    if value is None:
        return ()
    return value.parts if isinstance(value, Parts) else (value,)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str] | None = None,
    choices_method: Method = "token_length_normalized",
    n: int | None = None,
    dtype: type | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    **sampling: Any,
) -> Gen | Select:
    """Generate text: `s += gen("answer", max_tokens=64, stop="\\n")`, then read `s["answer"]`.

    If `choices` is set, this is `select`. `dtype` (int, float, bool or str) restricts the text to a value of this type.
    `sampling` are sampling parameters, under their names in any API (`regex`, `json_schema`, `temperature`, ...). If
    `n` is above 1, `s["answer"]` is a list of n texts, and the program continues with the first. Raises
    `InvalidRequest` for unknown names.
    """
    if choices:
        return select(name, choices, choices_method=choices_method)
    parameters: dict[str, Any] = {} if max_tokens is None else {"max_new_tokens": max_tokens}
    for key, value in sampling.items():
        own = own_name(key)
        if own is None:
            raise InvalidRequest(f"gen has no parameter {key}.", param=key)
        if value is not None:
            parameters[own] = value
    if dtype is not None:
        if dtype not in PATTERNS:
            raise InvalidRequest(f"dtype must be int, float, bool or str, not {dtype!r}.", param="dtype")
        if parameters.get("regex") is not None:
            raise InvalidRequest("regex and dtype exclude each other.", param="dtype")
        parameters["regex"] = PATTERNS[dtype]
    options = {
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
    }
    count = 1 if n is None else n
    return Gen(name, parameters, {key: value for key, value in options.items() if value is not None}, count)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen | Select:
    """Generate an integer. Other options are those of `gen`."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen | Select:
    """Generate a text in double quotes. Other options are those of `gen`."""
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: Method = "token_length_normalized",
) -> Select:
    """Choose the likeliest of several texts. `temperature` has no effect, as in SGLang."""
    if not choices:
        raise InvalidRequest("select needs choices.", param="choices")
    return Select(name, tuple(choices), choices_method)


def _message(role: Role, content: Expression | str | None) -> Expression:
    if content is None:
        return RoleBegin(role)
    return Parts((RoleBegin(role), *_parts(content), RoleEnd(role)))


def system(content: Expression | str | None = None) -> Expression:
    """Return a system message, or only its beginning if `content` is None."""
    return _message("system", content)


def user(content: Expression | str | None = None) -> Expression:
    """Return a user message, or only its beginning if `content` is None."""
    return _message("user", content)


def assistant(content: Expression | str | None = None) -> Expression:
    """Return an assistant message, whose content may be `gen`, or only its beginning if `content` is None."""
    return _message("assistant", content)


def system_begin() -> Expression:
    return RoleBegin("system")


def system_end() -> Expression:
    return RoleEnd("system")


def user_begin() -> Expression:
    return RoleBegin("user")


def user_end() -> Expression:
    return RoleEnd("user")


def assistant_begin() -> Expression:
    return RoleBegin("assistant")


def assistant_end() -> Expression:
    return RoleEnd("assistant")
