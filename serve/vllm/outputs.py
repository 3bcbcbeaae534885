"""vLLM's result classes, and functions that create them from the engine's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve.python.results import Generated
from serve.python.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Logprobs = list[dict[int, "Logprob"] | None]


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token, its rank in the vocabulary (None if not known), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt, complete or as far as it is generated.

    `logprobs` has one dict per token, which maps the ids of the chosen token and of the most likely tokens to their
    `Logprob`. `cumulative_logprob` is the sum over the chosen tokens. Both are None unless `logprobs` was set.
    `finish_reason` is "stop", "length" or "abort", or None while the output grows. `stop_reason` is the stop text or
    stop token id that ended the output, or None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None

    def finished(self) -> bool:
        """Return whether this output has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt.

    `prompt` is None if the prompt was given as token ids. `prompt_logprobs` has one dict per prompt token, as in
    `CompletionOutput.logprobs`, and None for the first token; it is None unless `prompt_logprobs` was set.
    `num_cached_tokens` counts prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    lora_request: Any = None


class _Vector:
    """Base class of a pooling model's results: the numbers as a tensor."""

    __slots__ = ()

    def _values(self) -> list[float]:
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The numbers as a tensor, float32 [size]."""
        import torch

        return torch.tensor(self._values())


@dataclass(slots=True)
class EmbeddingOutput(_Vector):
    """The embedding of a prompt."""

    embedding: list[float]

    def _values(self) -> list[float]:
        return self.embedding

    @property
    def hidden_size(self) -> int:
        """The number of values in the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput(_Vector):
    """The probability of each label of a prompt."""

    probs: list[float]

    def _values(self) -> list[float]:
        return self.probs

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput(_Vector):
    """A score of how well two texts match."""

    score: float

    def _values(self) -> list[float]:
        return [self.score]


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of a pooling model for one prompt. `outputs` is an embedding, classification or scoring output."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int] = field(default_factory=list)
    finished: bool = True


def request_output(
    prompt: str | list[int], ids: list[int], answers: Sequence[Generated], params: SamplingParams, lora: Any = None
) -> RequestOutput:
    """Return the `RequestOutput` of one prompt, from the engine's complete answers."""
    meta = answers[0].meta_info
    return RequestOutput(
        request_id=meta["id"],
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        prompt_logprobs=logprobs_of(meta, "input", params.prompt_logprobs),
        outputs=[completion_output(index, answer, params) for index, answer in enumerate(answers)],
        num_cached_tokens=meta["cached_tokens"],
        lora_request=lora,
    )


def completion_output(index: int, answer: Generated, params: SamplingParams) -> CompletionOutput:
    """Return a `CompletionOutput` for one answer of the engine, or for one piece of a stream."""
    chosen = [each.logprob or 0.0 for each in answer.token_logprobs] if params.logprobs is not None else None
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=answer.output_ids,
        cumulative_logprob=None if chosen is None else sum(chosen),
        logprobs=logprobs_of(answer.meta_info, "output", params.logprobs),
        finish_reason=answer.finish_reason,
        stop_reason=_stop_reason(answer, params),
    )


def _stop_reason(answer: Generated, params: SamplingParams) -> int | str | None:
    matched = (answer.meta_info["finish_reason"] or {}).get("matched")
    stops = {params.stop} if isinstance(params.stop, str) else {*params.stop}
    return matched if matched in stops or matched in {*params.stop_token_ids} else None


def logprobs_of(meta: Mapping[str, Any], side: str, count: int | None) -> Logprobs | None:
    """Return the log-probabilities of the chosen token and of the `count` most likely tokens, at each position.

    `side` is "input" for the prompt, or "output".
    """
    if count is None:
        return None
    chosen = meta.get(f"{side}_token_logprobs") or []
    tops = meta.get(f"{side}_top_logprobs") or [None] * len(chosen)
    found: Logprobs = []
    for (logprob, token_id, text), top in zip(chosen, tops, strict=True):
        if logprob is None:
            found.append(None)
            continue
        ranks = {each[1]: rank + 1 for rank, each in enumerate(top or ())}
        entries = {token_id: Logprob(logprob, ranks.get(token_id), text)}
        for rank, each in enumerate((top or ())[:count]):
            entries.setdefault(each[1], Logprob(each[0], rank + 1, each[2]))
        found.append(entries)
    return found
