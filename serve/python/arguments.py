"""Convert arguments of the Python API to bodies of the HTTP API, so that both APIs use the same names and checks.

Every argument that may be a list may also be a NumPy array or a torch tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Protocol

from runtime.errors import InvalidRequest
from runtime.sampling_params import NOT_BUILT, parameters
from serve.calls.decode import decode
from serve.calls.generate.schema import GenerateBody
from serve.python.sampling import SamplingParams, own_name


class Array(Protocol):
    """A NumPy array or a torch tensor."""

    def tolist(self) -> Any: ...


PLAIN = frozenset({int, float, str, bool, type(None)})  # types of JSON values that need no conversion
MEDIA = frozenset({"image_data", "video_data", "audio_data"})
Prompt = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]] | Array
Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def generate_body(
    prompt: Prompt | Ids | None, sampling_params: Sampling | None, input_ids: Ids | None, options: Mapping[str, Any]
) -> GenerateBody:
    """Return the arguments as a body of `/generate`, decoded and checked as in the native API.

    `options` are fields of the body and sampling parameters, which apply to all prompts. Raises `InvalidRequest`, whose
    `param` is the name of the argument.
    """
    fields, sampling = _divided(options)
    text: Any = prompt if prompt is None or isinstance(prompt, str) else as_json(prompt)
    ids: Any = input_ids
    if _are_ids(text):
        if ids is not None:
            raise InvalidRequest("prompt and input_ids must not be given together.", param="input_ids")
        text, ids = None, text
    values = {"text": text, "sampling_params": _merged(sampling_params, sampling, fields), "input_ids": ids}
    return decode(GenerateBody, set_values({**values, **fields}))


def divided(
    sampling_params: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (sampling parameters, fields of a request body). `options` may have both kinds."""
    fields, sampling = _divided(options)
    return _merged(sampling_params, sampling, fields) or {}, fields


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords as (body fields, sampling parameters). Raises `InvalidRequest` for unknown keywords."""
    fields: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in options.items():
        if name in GenerateBody.__dataclass_fields__ and name not in ("stream", "incremental"):
            fields[name] = value
        elif name in NOT_BUILT or own_name(name) is not None:
            sampling[own_name(name) or name] = value
        else:
            raise InvalidRequest(f"There is no option {name} here{_suggestion(name)}", param=name)
    return fields, sampling


def _suggestion(name: str) -> str:
    close = get_close_matches(name, _known(), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "."


@cache
def _known() -> tuple[str, ...]:
    return (*GenerateBody.__dataclass_fields__, *(parameter.name for parameter in parameters()))


def _merged(given: Sampling | None, keywords: dict[str, Any], fields: dict[str, Any]) -> Any:
    """Return the sampling parameters of `given` (an object or a list), overridden by `keywords`.

    If `given` is a `SamplingParams`, its log-probability settings are added to `fields`, because they are fields of
    the body.
    """
    if isinstance(given, SamplingParams):
        for name, value in given.body_fields().items():
            fields.setdefault(name, value)
    if given is None:
        return keywords or None
    if not isinstance(given, Mapping):
        return [{**_named(each), **keywords} for each in given] if isinstance(given, Sequence) else given
    return {**_named(given), **keywords}


def _named(params: Any) -> Any:
    """Return the sampling parameters under Penstock's names; a name of vLLM or OpenAI is replaced."""
    if not isinstance(params, Mapping):
        return params
    return {own_name(name) or name: value for name, value in params.items()}


def _are_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids, or a list of such lists."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return isinstance(first, int) or (isinstance(first, list) and bool(first) and isinstance(first[0], int))


def set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None, converted to JSON types. Media values are not converted."""
    return {name: value if name in MEDIA else as_json(value) for name, value in values.items() if value is not None}


def as_json(value: Any) -> Any:
    """Convert any sequence, array or tensor to a list, and any mapping to a dict with string keys."""
    if isinstance(value, str | bytes | int | float):  # first, because the next two checks are slow (abstract classes)
        return value
    if type(value) is list and PLAIN.issuperset(map(type, value)):  # fast path for long lists of token ids
        return value.copy()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [as_json(item) for item in value]
    tolist = getattr(value, "tolist", None)  # numpy and torch, arrays and scalars
    return tolist() if callable(tolist) else value
