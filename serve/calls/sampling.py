"""Read the sampling parameters of every API from JSON. `runtime.sampling_params` declares and checks them.

The sources of a parameter, from the lowest priority to the highest: the API's default, the model's generation_config
(OpenAI APIs only, and not with `--sampling-defaults openai`), `--preferred-sampling-params`, and the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from runtime.config.model_facts import ModelFacts
from runtime.errors import InvalidRequest
from runtime.sampling_params import FROM_MODEL, NOT_BUILT, Api, SamplingParams, parameters
from serve.calls.decode import Fields, NotBuiltNumber
from serve.calls.errors import renamed

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


def read_sampling(api: Api, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the parameters that a JSON object sets, under their names in `SamplingParams`.

    Raises `InvalidRequest`, whose `param` is a path below `path`, for a value of the wrong type. The native API's
    object has only sampling parameters, so its unknown keys also raise.
    """
    if not body:
        return {}
    values = _fields(api).read(body, path)
    parameters: dict[str, Any] = {}
    for name, parameter, low in _names(api):
        if name not in values:
            continue
        value = values[name]
        if value is not None and low is not None and value < low:
            param = f"{path}.{name}" if path else name
            raise InvalidRequest(f"{param} must be at least {low:g}.", param=param)
        if parameters.get(parameter) is None:
            parameters[parameter] = value
    return parameters


def sampling_params(
    api: Api,
    requested: Mapping[str, Any],
    preferred: Mapping[str, Any],
    *,
    facts: ModelFacts | None = None,
    path: str = "",
) -> SamplingParams:
    """Return the sampling parameters; `requested` (from `read_sampling`) overrides `preferred`.

    `preferred` overrides the generation_config in `facts`, which overrides the API's defaults. Raises `InvalidRequest`,
    whose `param` is the API's name of the parameter, below `path`.
    """
    from_model = _generation_defaults(facts) if facts is not None else {}
    values = {**_defaults(api), **read_sampling("native", {**from_model, **preferred}, path), **requested}
    try:
        return SamplingParams(**{name: _read(name, value) for name, value in values.items()})
    except InvalidRequest as error:
        name = sampling_names(api).get(str(error.param), str(error.param))
        raise renamed(error, f"{path}.{name}" if path else name) from None


def sampling_of_call(core: EngineCore, api: Api, requested: Mapping[str, Any]) -> SamplingParams:
    """Return a request's sampling parameters, with this server's defaults for those that the request leaves out.

    Raises `InvalidRequest` like `sampling_params`.
    """
    serve = core.plan.serve
    facts = core.facts if serve.model_sampling else None
    return sampling_params(api, requested, serve.preferred_sampling, facts=facts)


@cache
def sampling_names(api: Api) -> Mapping[str, str]:
    """Map the names in `SamplingParams` to the API's names, for the parameters that the API accepts."""
    return {p.name: p.names_in(api)[0] for p in parameters() if p.names_in(api)}


def sampling_fields(api: Api) -> frozenset[str]:
    """Return the keys that the API reads as sampling parameters, or refuses by name."""
    return frozenset(_fields(api).names)


@cache
def _fields(api: Api) -> Fields:
    hints: dict[str, Any] = {name: p.json for p in parameters() for name in p.names_in(api)}
    return Fields(hints | dict.fromkeys(NOT_BUILT, NotBuiltNumber), closed=api == "native")


@cache
def _names(api: Api) -> Sequence[tuple[str, str, float | None]]:
    """Return (name in the API, name in `SamplingParams`, the API's minimum or None) of each parameter.

    If a parameter has several names in the API, the preferred name comes first.
    """
    return [
        (name, p.name, taken.low) for p in parameters() if (taken := p.spec.apis.get(api)) for name in p.names_in(api)
    ]


@cache
def _defaults(api: Api) -> Mapping[str, Any]:
    """Return the API's defaults that differ from the defaults of `SamplingParams`."""
    return {p.name: p.default_in(api) for p in parameters() if p.default_in(api) is not p.default}


@cache
def _readers() -> Mapping[str, Any]:
    return {p.name: p.spec.read for p in parameters() if p.spec.read is not None}


def _read(name: str, value: Any) -> Any:
    """Convert a JSON value to the parameter's value."""
    read = _readers().get(name)
    return value if read is None else read(value)


def _generation_defaults(facts: ModelFacts) -> dict[str, Any]:
    """Return the defaults of the model's generation_config. Its top_k of 0 means "off" and becomes -1."""
    defaults = {name: facts.preferred_sampling[name] for name in FROM_MODEL if name in facts.preferred_sampling}
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1
    return defaults
