"""Results of the Python API: dicts as in the HTTP API, whose keys are also attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from serve.python import html

if TYPE_CHECKING:
    from runtime.actors.request_times import RequestTimes


class Fields(dict[str, Any]):
    """A JSON object whose keys are also attributes: `answer.text` is `answer["text"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name!r}; it has {', '.join(self)}") from None

    def __dir__(self) -> Iterator[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter([*super().__dir__(), *self])


class TokenLogprob(NamedTuple):
    """A token of an output with its log-probability. `text` is None unless `return_text_in_logprobs` was set."""

    logprob: float | None
    id: int
    text: str | None = None


class Account(NamedTuple):
    """The costs of a request. Times are in seconds.

    `queue_s` is the time from the call to the launch of the first step, `prefill_s` the time from this launch to the
    first token, and `decode_s` the time from the first token to the end. `cached_tokens` is the number of prompt tokens
    from the prefix cache. `computed_tokens` counts the other prompt tokens, and all output tokens except the last,
    which no step reads.

    `page_seconds` is the number of KV cache pages of the output at its end, times the seconds since its first step.
    This is an upper bound, because pages are allocated as the output grows, and prompt pages may be shared.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    computed_tokens: int
    page_seconds: float

    @classmethod
    def of(cls, times: RequestTimes, meta: Mapping[str, Any], ended_s: float, page_size: int) -> Account:
        """Return the account of an output that ended at `ended_s` (monotonic clock). `meta` is its `meta_info`."""
        scheduled = times.scheduled or ended_s
        first = times.first_token or ended_s
        cached, output = meta["cached_tokens"], meta["completion_tokens"]
        pages = -(-(meta["prompt_tokens"] + output) // page_size)
        computed = meta["prompt_tokens"] - cached + max(0, output - 1)
        seconds = ended_s - scheduled
        return cls(scheduled - times.arrived, first - scheduled, ended_s - first, cached, computed, pages * seconds)


class Generated(Fields):
    """One output: `text`, `output_ids` and `meta_info`, as `/generate` returns them.

    `finish_reason`, `token_logprobs` and `account` are further attributes, not keys. A notebook shows the text, with
    tokens coloured by probability if the call asked for log-probabilities.
    """

    text: str
    output_ids: list[int]
    meta_info: Fields
    prompt: str | None  # the prompt, if it was given as a text; not a key, because the HTTP API does not return it
    account: Account | None  # the costs of the request; None before its end

    def __init__(self, values: Mapping[str, Any], *, prompt: str | None = None, account: Account | None = None) -> None:
        super().__init__(values)
        self["meta_info"] = Fields(values["meta_info"])
        self.__dict__["prompt"], self.__dict__["account"] = prompt, account

    @property
    def finish_reason(self) -> str | None:
        """The reason why the output ended: "stop", "length" or "abort". None before the end."""
        reason = self["meta_info"]["finish_reason"]
        return None if reason is None else reason["type"]

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """The tokens of the output with their log-probabilities. Empty without `return_logprob=True`."""
        return [TokenLogprob(*entry) for entry in self["meta_info"].get("output_token_logprobs", ())]

    def _repr_html_(self) -> str:
        return html.generated(self)


class Piece(Generated):
    """A piece of a stream: `delta` is the new text, `text` the whole text so far, `output_ids` the new token ids.

    `index` is the number of the output, counted over all prompts of the call.
    """

    delta: str
    index: int


class Encoded(Fields):
    """The result of a pooling model: `embedding` and `meta_info`, as `/encode` and `/classify` return them."""

    embedding: list[float] | None
    meta_info: Fields

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        if isinstance(self.get("meta_info"), dict):
            self["meta_info"] = Fields(self["meta_info"])

    def _repr_html_(self) -> str:
        return html.encoded(self)


class Batch(list[Generated]):
    """The outputs of a list of prompts, in order. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return html.batch(self)
