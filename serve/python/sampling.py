"""`SamplingParams` of the Python API: sampling parameters, checked when they are created."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from runtime.errors import InvalidRequest
from runtime.sampling_params import parameters
from serve.calls.sampling import read_sampling, sampling_params

VLLM_LOGPROBS = ("logprobs", "prompt_logprobs")


class RequestOutputKind(Enum):
    """Form of a stream's outputs, as in vLLM: each has all text so far, only new text, or there is one at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(dict[str, Any]):
    """Sampling parameters and stop conditions: `SamplingParams(temperature=0, max_new_tokens=64)`.

    A dict of the values that were set, under Penstock's names. The names of vLLM and OpenAI are also accepted
    (`max_tokens` means `max_new_tokens`). Parameters that are not set have the engine's defaults. `logprobs` and
    `prompt_logprobs`, as in vLLM, are the number of alternatives per token of the output and of the prompt. `AsyncLLM`
    reads `output_kind`, and custom logits processors can read `extra_args`. Parameters can also be set as attributes.

    Raises `InvalidRequest`, whose `param` is the parameter's name, for an unknown, repeated or unsupported parameter.
    """

    logprobs: int | None
    prompt_logprobs: int | None
    output_kind: RequestOutputKind | None
    extra_args: Mapping[str, Any] | None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_new_tokens: int | None = 128,
            max_tokens: int | None = 128,
            min_new_tokens: int = 0,
            min_tokens: int = 0,
            temperature: float = 1.0,
            top_n_sigma: float = -1.0,
            typical_p: float = 1.0,
            top_k: int = -1,
            top_p: float = 1.0,
            min_p: float = 0.0,
            xtc_probability: float = 0.0,
            xtc_threshold: float = 0.1,
            frequency_penalty: float = 0.0,
            presence_penalty: float = 0.0,
            repetition_penalty: float = 1.0,
            stop: str | Sequence[str] = (),
            stop_token_ids: Sequence[int] = (),
            ignore_eos: bool = False,
            n: int = 1,
            seed: int | None = None,
            logit_bias: Mapping[int, float] = {},
            allowed_token_ids: Sequence[int] | None = None,
            bad_words: Sequence[str] = (),
            json_schema: str | Mapping[str, Any] | None = None,
            regex: str | None = None,
            ebnf: str | None = None,
            structural_tag: str | Mapping[str, Any] | None = None,
            choice: Sequence[str] | None = None,
            lark: str | None = None,
            skip_special_tokens: bool = True,
            spaces_between_special_tokens: bool = True,
            no_stop_trim: bool = False,
            stream_interval: int | None = None,
            speculative: int | bool | None = None,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            output_kind: RequestOutputKind | None = None,
            extra_args: Mapping[str, Any] | None = None,
            structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
            **others: Any,
        ) -> None: ...

    else:

        def __init__(self, **values: Any) -> None:
            self.__dict__["logprobs"] = _number(values, "logprobs")
            self.__dict__["prompt_logprobs"] = _number(values, "prompt_logprobs")
            self.__dict__["output_kind"] = values.pop("output_kind", None)
            self.__dict__["extra_args"] = values.pop("extra_args", None)
            if values.pop("detokenize", True) is not True:
                raise InvalidRequest("detokenize=False is not supported; leave it out.", param="detokenize")
            for name in ("structured_outputs", "guided_decoding"):
                values |= _grammar(values.pop(name, None), name)
            mine: dict[str, Any] = {}
            for name, value in values.items():
                own = own_name(name)
                if own is None:
                    raise InvalidRequest(f"{name} is not a sampling parameter{_suggestion(name)}", param=name)
                if own in mine:
                    raise InvalidRequest(f"{own} and {name} are the same parameter; give one of them.", param=name)
                mine[own] = value
            super().__init__(mine)
            self._check()

    def _check(self) -> None:
        plain: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.items()
        }
        biases: Any = plain.get("logit_bias")
        if isinstance(biases, Mapping):
            plain["logit_bias"] = {str(token): bias for token, bias in biases.items()}
        sampling_params("native", read_sampling("native", plain), {})

    def __getattr__(self, name: str) -> Any:
        own = own_name(name)
        if own is None:
            raise AttributeError(f"{name} is not a sampling parameter{_suggestion(name)}")
        value = self.get(own)
        return _defaults()[own] if value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and set a parameter. The name may be Penstock's, vLLM's or OpenAI's."""
        if name in self.__dict__:
            self.__dict__[name] = _number({name: value}, name) if name in VLLM_LOGPROBS else value
            return
        own = own_name(name)
        if own is None:
            raise InvalidRequest(f"{name} is not a sampling parameter{_suggestion(name)}", param=name)
        checked = type(self)(**{**self, own: value})
        self[own] = checked[own]

    def __repr__(self) -> str:
        logprobs = {name: getattr(self, name) for name in VLLM_LOGPROBS if getattr(self, name) is not None}
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in {**self, **logprobs}.items())})"

    def clone(self) -> Self:
        """Return a copy."""
        made = type(self)(**self)
        made.__dict__.update(self.__dict__)
        return made

    def body_fields(self) -> dict[str, Any]:
        """Return the fields of `/generate` that request log-probabilities. Empty if none are requested."""
        if self.logprobs is None and self.prompt_logprobs is None:
            return {}
        fields: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True}
        fields["top_logprobs_num"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        if self.prompt_logprobs is not None:
            fields["logprob_start_len"] = 0
        return fields


@dataclass(kw_only=True, slots=True)
class StructuredOutputsParams:
    """vLLM's output constraints, for `SamplingParams(structured_outputs=...)`. Set exactly one field."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def parameters(self) -> dict[str, Any]:
        """Return the same constraint as sampling parameters with Penstock's names."""
        schema = {"type": "object"} if self.json_object else self.json
        values = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "ebnf": self.grammar}
        return {name: value for name, value in values.items() if value is not None}


def own_name(name: str) -> str | None:
    """Return Penstock's name of a sampling parameter of any API, or None if the name is not known."""
    return _names().get(name)


@cache
def _names() -> Mapping[str, str]:
    names = {name: parameter.name for parameter in parameters() for name in parameter.names_in("native")}
    for api in ("completions", "chat"):
        for parameter in parameters():
            for name in parameter.names_in(api):
                names.setdefault(name, parameter.name)
    return names


@cache
def _defaults() -> Mapping[str, Any]:
    return {parameter.name: parameter.default for parameter in parameters()}


def _suggestion(name: str) -> str:
    close = get_close_matches(name, [*_names()], n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "."


def _number(values: dict[str, Any], name: str) -> int | None:
    value = values.pop(name, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InvalidRequest(f"{name} must be a number of alternatives, not {value!r}.", param=name)
    return value


def _grammar(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        try:
            value = StructuredOutputsParams(**value)
        except TypeError as error:
            raise InvalidRequest(f"{name}: {error}.", param=name) from None
    if not isinstance(value, StructuredOutputsParams):
        raise InvalidRequest(f"{name} must be a StructuredOutputsParams or a dict.", param=name)
    return value.parameters()


def _signature() -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    mine = [inspect.Parameter(p.name, keyword, default=p.default, annotation=p.json) for p in parameters()]
    theirs = [inspect.Parameter(name, keyword, default=None, annotation=int | None) for name in VLLM_LOGPROBS]
    return inspect.Signature([*mine, *theirs])


def _documentation() -> str:
    lines = [f"    {p.name} = {p.default!r}: {p.spec.help}" for p in parameters()]
    return f"{SamplingParams.__doc__}\n\n    " + "\n    ".join(line.strip() for line in lines)


SamplingParams.__signature__ = _signature()  # pyright: ignore[reportAttributeAccessIssue]
SamplingParams.__doc__ = _documentation()
