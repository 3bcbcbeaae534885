"""Make requests from token ids. Requests with equal parameters are checked and converted only once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.request import Request, renewed
from serve.calls.generate.schema import requests_of
from serve.python.arguments import as_json, generate_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_TEMPLATES = 64
SIMPLE = (str, bool, int, float, type(None))
# Fields of `/generate` that requests with a shared template may set.
FIELDS = frozenset(
    {
        "cache_salt",
        "extra_key",
        "log_metrics",
        "logprob_start_len",
        "lora_path",
        "priority",
        "prompt_cache_key",
        "return_logprob",
        "return_text_in_logprobs",
        "service_tier",
        "session_id",
        "timeout_s",
        "top_logprobs_num",
    }
)


class RequestTemplates:
    """Makes the requests of one engine. If only the token ids differ, copies an earlier request, the template."""

    def __init__(self) -> None:
        self._templates: dict[Hashable, Request] = {}

    def __len__(self) -> int:
        return len(self._templates)

    def request(
        self, core: EngineCore, ids: Sequence[int], sampling: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> Request:
        """Return a request for these token ids. `fields` are fields of `/generate`.

        Raises `InvalidRequest`, whose `param` is the name of the parameter.
        """
        key = _key(sampling, fields)
        template = None if key is None else self._templates.get(key)
        if template is not None and all(type(each) is int for each in ids):
            return renewed(template, tuple(ids))
        [request] = requests_of(generate_body(None, sampling, [as_json(ids)], fields), core)
        if key is not None:
            if len(self._templates) >= MAX_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[key] = replace(request, ids=None)
        return request


def _key(sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Hashable:
    """Return a key that is equal only for equal parameters, or None if the request cannot share a template.

    A request cannot share a template if it has a seed, a field that is not in `FIELDS`, or a value that is not simple.
    The key contains the values' types, because True equals 1 but is not a valid number of tokens. It contains the
    number of sampling parameters, so that the same name in `sampling` and in `fields` gives different keys.
    """
    if sampling.get("seed") is not None or not FIELDS.issuperset(fields):
        return None
    key: list[Hashable] = [len(sampling)]
    for name, value in (*sampling.items(), *fields.items()):
        if isinstance(value, list | tuple):
            if not all(isinstance(each, SIMPLE) for each in value):
                return None
            value = (*value, *map(type, value))
        elif not isinstance(value, SIMPLE):
            return None
        key.append((name, type(value), value))
    return tuple(key)
