"""Classify prompts with a classifier or reward model: requests, and answers with labels and probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.calls.decode import NotBuilt
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.generate.schema import GenerateBody, requests_of
from serve.calls.prompts import AdapterName, Ids, Label, Texts, vector_requests
from serve.calls.scores.ranking import probabilities

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class ClassifyBody:
    """The body of `/classify`. A list in `text`, or a list of lists in `input_ids`, makes a batch.

    If `text_pair` is set, each text is classified together with the text at the same index in `text_pair`.
    """

    text: Texts | None = None
    text_pair: Texts | None = None
    input_ids: Ids | None = None
    rid: Label | list[Label] | None = None
    truncate: bool | None = None
    image_data: NotBuilt = None
    lora_path: AdapterName | list[AdapterName | None] | None = None
    priority: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class ClassifyListBody:
    """The body of `/v1/classify`."""

    input: Texts | Ids
    model: str | None = None
    truncate: bool | None = None


def classify_requests(core: EngineCore, body: ClassifyBody) -> tuple[bool, list[Request]]:
    """Return whether the call is a batch, and its requests.

    Raises `InvalidRequest` if the model is not a classifier.
    """
    if not core.facts.labels:
        raise InvalidRequest("This model is not a classifier: it has no labels.")
    body_of_texts = GenerateBody(text=body.text, input_ids=body.input_ids, rid=body.rid, lora_path=body.lora_path)
    requests = vector_requests(requests_of(body_of_texts, core), core, truncate=body.truncate)
    if body.text_pair is None:
        return body_of_texts.is_batch, requests
    pairs = [body.text_pair] if isinstance(body.text_pair, str) else body.text_pair
    if body.text is None or isinstance(body.text_pair, list) != body_of_texts.is_batch or len(pairs) != len(requests):
        raise InvalidRequest("text_pair must hold as many texts as text.", param="text_pair")
    if not core.facts.is_encoder:
        raise InvalidRequest("This model does not accept pairs of texts.", param="text_pair")
    return body_of_texts.is_batch, [
        replace(request, second_text=second) for request, second in zip(requests, pairs, strict=True)
    ]


def classified(
    core: EngineCore, requests: Sequence[Request], answers: Sequence[Sequence[Chunk]]
) -> list[dict[str, Any]]:
    """Return one answer per request. As in SGLang, `embedding` holds the labels' scores.

    `label` is None if the model has only one label.
    """
    labels, activation = core.facts.labels, core.facts.score_activation
    results = GenerateAnswers(core, requests, indexed=False).embeddings(answers)
    for result in results:
        scores = result["embedding"]
        if scores is None:  # the request was aborted
            continue
        result["label"] = labels[max(range(len(scores)), key=scores.__getitem__)] if len(scores) > 1 else None
        result["probs"] = probabilities(scores, activation)
    return results
