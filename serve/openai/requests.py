"""From an OpenAI body to the engine's request: what chat and completions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from runtime.errors import InvalidRequest
from runtime.request import SamplingParams
from serve.decode import decode
from serve.endpoint import parse_object
from serve.errors import renamed
from serve.openai.schema import NAMES, OpenAIBody
from serve.sampling import generation_defaults, sampling_params

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Body = TypeVar("Body", bound=OpenAIBody)

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "seed",
)
_FLAGS = ("no_stop_trim", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")


def decode_body(cls: type[Body], raw: bytes) -> Body:
    """Raises `InvalidRequest`, also for what is not built yet."""
    body = decode(cls, parse_object(raw))
    if body.response_format is not None:
        body.response_format.check()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    return body


def sampling_of(
    core: EngineCore, body: OpenAIBody, *, max_tokens: int | None, temperature: float
) -> SamplingParams:
    """Sampling as asked for, over --preferred-sampling-params, the model's own defaults and `temperature`."""
    preferred = {
        "temperature": temperature,
        **generation_defaults(core.facts),
        **core.plan.serve.preferred_sampling,
    }
    asked = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    asked |= {name: getattr(body, name) for name in _FLAGS}
    asked |= {"n": body.n, "max_new_tokens": max_tokens}
    if body.min_tokens is not None:
        asked["min_new_tokens"] = body.min_tokens
    try:
        return sampling_params(asked, preferred)
    except InvalidRequest as error:
        raise renamed(error, NAMES.get(str(error.param), str(error.param))) from None
