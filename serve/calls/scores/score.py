"""Score the probability that labels follow a text, or how well pairs of texts match."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from runtime.errors import InvalidRequest
from runtime.request import LogprobParams, Request
from runtime.sampling_params import MAX_BIASES, SamplingParams
from serve.calls.decode import Length, NotBuilt
from serve.calls.prompts import MAX_PROMPTS, Texts
from serve.calls.scores.ranking import Answers, requested_logprobs
from serve.calls.work_budget import check_joined

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class ScoreBody:
    """The body of /v1/score and /score. `user` is accepted without effect.

    With `label_token_ids`, the call returns the probability that each label follows the query and an item. With
    `text_1` and `text_2`, it returns how well the texts of each pair match.
    """

    query: str | list[int] | None = None
    items: Texts | Annotated[list[list[int]], Length(1, MAX_PROMPTS)] | None = None
    label_token_ids: Annotated[list[int], Length(1, MAX_BIASES)] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: Texts | None = None
    text_2: Texts | None = None
    truncate: bool | None = None
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = None
    use_activation: Literal[True] = True
    priority: NotBuilt = None


def pairs_of(body: ScoreBody) -> list[tuple[str, str]]:
    if body.query is not None or body.items is not None or body.label_token_ids is not None:
        raise InvalidRequest(
            "text_1 and text_2 cannot be combined with query, items or label_token_ids.", param="text_1"
        )
    for name in ("apply_softmax", "item_first"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} cannot be combined with text_1 and text_2.", param=name)
    sides = [[each] if isinstance(each, str) else list(each or ()) for each in (body.text_1, body.text_2)]
    first, second = sides
    if len(first) == 1:
        check_joined(first[0], second, "text_1")
        first = first * len(second)
    if not first or len(first) != len(second):
        raise InvalidRequest(
            "text_1 and text_2 must have the same number of texts, or text_1 must be a single text.",
            param="text_2",
        )
    for name, side in zip(("text_1", "text_2"), (first, second)):
        if not all(side):
            raise InvalidRequest(f"{name} must not contain empty texts.", param=name)
    return list(zip(first, second))


def label_requests(core: EngineCore, body: ScoreBody) -> list[Request]:
    """Return one request per item. Raises `InvalidRequest` if a field is missing or the fields do not fit together."""
    for name in ("query", "items", "label_token_ids"):
        if getattr(body, name) is None:
            raise InvalidRequest(f"{name} is missing.", param=name)
    if core.plan.model.is_embedding:
        raise InvalidRequest(
            "This model does not generate text; send text_1 and text_2 instead.", param="label_token_ids"
        )
    if body.truncate:
        raise InvalidRequest("query and items are never truncated; remove truncate.", param="truncate")
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items or ())
    query: Any = body.query or ("" if isinstance(items[0], str) else [])
    check_joined(query, items, "query")
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    logprobs = LogprobParams(token_ids=tuple(body.label_token_ids or ()))
    requests = []
    for index, item in enumerate(items):
        if type(item) is not type(query):
            raise InvalidRequest("query and items must both be texts or both token ids.", param=f"items.{index}")
        whole = item + query if body.item_first else query + item
        if not whole:
            raise InvalidRequest(f"items.{index} must not be empty.", param=f"items.{index}")
        requests.append(
            Request(
                text=whole if isinstance(whole, str) else None,
                ids=None if isinstance(whole, str) else tuple(whole),
                sampling=sampling,
                logprobs=logprobs,
            )
        )
    return requests


def label_scores(answers: Answers, *, softmax: bool) -> list[list[float]]:
    """Return the probability of each label, for each item.

    If `softmax` is true, the probabilities of the labels add up to 1. Otherwise they are relative to the vocabulary.
    """
    scores = []
    for chunks in answers:
        probabilities = [math.exp(logprob) for logprob in requested_logprobs(chunks)]
        total = sum(probabilities) if softmax else 1.0
        scores.append([probability / total for probability in probabilities] if total else probabilities)
    return scores
