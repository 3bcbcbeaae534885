"""How well texts fit each other: requests for pairs of them, and a score of each pair from the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import InvalidRequest
from runtime.request import Chunk, LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve.prompts import vector_requests

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Pairs = Sequence[tuple[str, str]]  # (query, document)
Answers = Sequence[Sequence[Chunk]]  # one chunk for each request
Scores = Callable[[Answers], list[float]]  # of each pair; takes long for many large vectors: for a thread

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The task of Qwen3-Reranker (arXiv 2506.05176), which other models that follow instructions understand as well.
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
WORDS = ("yes", "no")


def rank(
    core: EngineCore, pairs: Pairs, *, instruction: str | None = None, truncate: bool | None = None
) -> tuple[list[Request], Scores]:
    """Requests for these pairs, and what makes a score of each pair from their answers.

    A cross-encoder (one label) reads both texts; a model for vectors gives the cosine of both; a model that writes text
    gives the probability of "yes" against "no". Raises `InvalidRequest` where the model can do none of that, and for
    `truncate` where the texts stand within a chat: its end, which would be cut off, is the question.
    """
    if core.facts.labels:
        return _by_cross_encoder(core, pairs, instruction, truncate)
    if core.plan.model.is_embedding:
        return _by_vectors(core, pairs, instruction, truncate)
    return _by_words(core, pairs, instruction or INSTRUCTION, truncate)


def probabilities(scores: Sequence[float], activation: str) -> list[float] | None:
    """Of a classifier's labels; None where its scores are not made to be probabilities."""
    if activation == "sigmoid":
        return [_sigmoid(score) for score in scores]
    if activation == "softmax":
        highest = max(scores)
        parts = [math.exp(score - highest) for score in scores]
        return [part / sum(parts) for part in parts]
    return None


def vector_of(chunks: Sequence[Chunk]) -> list[float]:
    """Raises `InvalidRequest` where the request was aborted."""
    [chunk] = chunks
    if chunk.embedding is None:
        raise InvalidRequest("The request was aborted before its result was computed.")
    return chunk.embedding


def _by_cross_encoder(
    core: EngineCore, pairs: Pairs, instruction: str | None, truncate: bool | None
) -> tuple[list[Request], Scores]:
    labels, activation = core.facts.labels, core.facts.score_activation
    if len(labels) != 1:
        raise InvalidRequest(f"This model has {len(labels)} labels, and one makes a ranking; use /classify.")
    if core.facts.is_encoder:
        _refuse_instruction(instruction)
        requests = [Request(text=first, second_text=second) for first, second in pairs]
    else:
        _refuse_truncate(truncate)
        instruction, truncate = instruction or INSTRUCTION, False
        requests = [
            Request(text=_prompt(core, pair, instruction), add_special_tokens=False) for pair in pairs
        ]

    def scores(answers: Answers) -> list[float]:
        found = [vector_of(chunks) for chunks in answers]
        return [(probabilities(score, activation) or score)[0] for score in found]

    return vector_requests(requests, core, truncate=truncate), scores


def _by_vectors(
    core: EngineCore, pairs: Pairs, instruction: str | None, truncate: bool | None
) -> tuple[list[Request], Scores]:
    """Each text is computed once, with the checkpoint's prompt for queries or documents if it has one."""
    _refuse_instruction(instruction)
    prompts, requests, numbers = core.facts.prompts, [], []
    for side, name in enumerate(("query", "document")):
        texts = dict.fromkeys(pair[side] for pair in pairs)
        indices = {text: len(requests) + index for index, text in enumerate(texts)}
        wanted = [Request(text=text) for text in texts]
        prompt_name = name if name in prompts else None
        requests += vector_requests(wanted, core, prompt_name=prompt_name, truncate=truncate)
        numbers.append([indices[pair[side]] for pair in pairs])

    def scores(answers: Answers) -> list[float]:
        found = [_of_length_one(vector_of(chunks)) for chunks in answers]
        return [float(found[first] @ found[second]) for first, second in zip(*numbers, strict=True)]

    return requests, scores


def _by_words(
    core: EngineCore, pairs: Pairs, instruction: str, truncate: bool | None
) -> tuple[list[Request], Scores]:
    _refuse_truncate(truncate)
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer, and ranks texts alone.", param="query")
    encoded = core.tokenizer.encode_batch(WORDS, add_special_tokens=False)
    if any(len(ids) != 1 for ids in encoded):
        raise InvalidRequest('"yes" and "no" are not single tokens of this model: it cannot rank.')
    requests = [
        Request(
            text=_prompt(core, pair, instruction),
            add_special_tokens=False,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            logprobs=LogprobParams(token_ids=(encoded[0][0], encoded[1][0])),
        )
        for pair in pairs
    ]

    def scores(answers: Answers) -> list[float]:
        found = [requested_logprobs(chunks) for chunks in answers]
        return [_sigmoid(yes - no) for yes, no in found]

    return requests, scores


def requested_logprobs(chunks: Sequence[Chunk]) -> list[float]:
    """The log-probabilities of the requested ids as the first output token, in their order."""
    [chunk] = chunks
    found = chunk.logprobs.requested[0] if chunk.logprobs is not None and chunk.logprobs.requested else None
    if found is None:
        raise InvalidRequest("The request was aborted before its result was computed.")
    return [logprob for logprob, _ in found]


def _prompt(core: EngineCore, pair: tuple[str, str], instruction: str) -> str:
    query, document = pair
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": asked}]
    from serve.chat.request import ChatRequest, render  # imports all that parses chats

    return render(core, ChatRequest(messages=messages, template_kwargs={"enable_thinking": False}))


def _refuse_instruction(instruction: str | None) -> None:
    if instruction is not None:
        raise InvalidRequest("This model reads no instruction; leave it out.", param="instruction")


def _refuse_truncate(truncate: bool | None) -> None:
    if truncate:
        raise InvalidRequest(
            "This model reads the texts within a chat, which is not cut; leave truncate out and shorten the texts.",
            param="truncate",
        )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _of_length_one(vector: Sequence[float]) -> np.ndarray:
    """float64 [size]; zeros stay as they are."""
    array = np.array(vector, dtype=np.float64)
    return array / (np.linalg.norm(array) or 1.0)
