"""Sampling parameters as JSON, for every API: what is taken and checked is declared in `runtime.sampling_params`.

The rule of defaults, weakest first: the API's own, the model's generation_config (OpenAI APIs only),
`--preferred-sampling-params`, the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from runtime.config.model_facts import ModelFacts
from runtime.errors import InvalidRequest
from runtime.sampling_params import FROM_MODEL, NOT_BUILT, Api, SamplingParams, parameters
from serve.decode import Fields, NotBuilt
from serve.errors import renamed


def read_sampling(api: Api, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The parameters that a JSON object sets, by their names in `SamplingParams`.

    Raises `InvalidRequest` below `path` for a value of the wrong type, and for unknown keys in the native API,
    where the object holds nothing but sampling parameters.
    """
    if not body:
        return {}
    found = _fields(api).read(body, path)
    asked: dict[str, Any] = {}
    for name, parameter, low in _names(api):
        if name not in found:
            continue
        value = found[name]
        if value is not None and low is not None and value < low:
            param = f"{path}.{name}" if path else name
            raise InvalidRequest(f"{param} must be at least {low:g}.", param=param)
        if asked.get(parameter) is None:
            asked[parameter] = value
    return asked


def sampling_params(
    api: Api,
    asked: Mapping[str, Any],
    preferred: Mapping[str, Any],
    *,
    facts: ModelFacts | None = None,
    path: str = "",
) -> SamplingParams:
    """What `read_sampling` found, over what is preferred here, over the defaults of the model and of the API.

    Raises `InvalidRequest` with the API's name of the parameter, below `path`.
    """
    of_model = _generation_defaults(facts) if facts is not None else {}
    values = {**_defaults(api), **read_sampling("native", {**of_model, **preferred}, path), **asked}
    try:
        return SamplingParams(**{name: _read(name, value) for name, value in values.items()})
    except InvalidRequest as error:
        name = sampling_names(api).get(str(error.param), str(error.param))
        raise renamed(error, f"{path}.{name}" if path else name) from None


@cache
def sampling_names(api: Api) -> Mapping[str, str]:
    """By its name in `SamplingParams`, what an API calls a parameter that it takes."""
    return {p.name: p.names_in(api)[0] for p in parameters() if p.names_in(api)}


def sampling_fields(api: Api) -> frozenset[str]:
    """Every key that is read, or refused by its name."""
    return frozenset(_fields(api).names)


@cache
def _fields(api: Api) -> Fields:
    hints: dict[str, Any] = {name: p.json for p in parameters() for name in p.names_in(api)}
    return Fields(hints | dict.fromkeys(NOT_BUILT, NotBuilt), closed=api == "native")


@cache
def _names(api: Api) -> Sequence[tuple[str, str, float | None]]:
    """What an API calls each parameter, the preferred name first; the parameter; the API's own least value."""
    return [
        (name, p.name, taken.low)
        for p in parameters()
        if (taken := p.spec.apis.get(api))
        for name in p.names_in(api)
    ]


@cache
def _defaults(api: Api) -> Mapping[str, Any]:
    """Where they are not those of `SamplingParams`."""
    return {p.name: p.default_in(api) for p in parameters() if p.default_in(api) is not p.default}


@cache
def _readers() -> Mapping[str, Any]:
    return {p.name: p.spec.read for p in parameters() if p.spec.read is not None}


def _read(name: str, value: Any) -> Any:
    """From a JSON value to the parameter's."""
    read = _readers().get(name)
    return value if read is None else read(value)


def _generation_defaults(facts: ModelFacts) -> dict[str, Any]:
    """The model's own defaults, in our terms: a top_k of 0 is off."""
    found = {name: facts.preferred_sampling[name] for name in FROM_MODEL if name in facts.preferred_sampling}
    if found.get("top_k") == 0:
        found["top_k"] = -1
    return found
