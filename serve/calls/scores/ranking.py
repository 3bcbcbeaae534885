"""Score how well two texts match: create the requests for pairs of texts, and compute scores from the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from runtime.errors import InvalidRequest
from runtime.request import Chunk, LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve.calls.prompts import vector_requests

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Pairs = Sequence[tuple[str, str]]  # (query, document)
Answers = Sequence[Sequence[Chunk]]  # for each request, a list with its only chunk
# Returns one score per pair. Call it in a thread, because large vectors take long.
Scores = Callable[[Answers], list[float]]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The instruction of Qwen3-Reranker (arXiv 2506.05176). Other instruction-tuned models understand it too.
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
WORDS = ("yes", "no")


def rank(
    core: EngineCore, pairs: Pairs, *, instruction: str | None = None, truncate: bool | None = None
) -> tuple[list[Request], Scores]:
    """Return requests for these pairs, and a function that computes each pair's score from the answers.

    With a cross-encoder (a classifier with one label), the score is its output for both texts. With an embedding model,
    it is the cosine similarity of both vectors. With a generative model, it is the probability of "yes" relative to
    "no".

    Raises `InvalidRequest` if the model supports none of these methods. Also raises if `truncate` is true and the texts
    are part of a chat prompt, because truncation would cut off the end of the prompt.
    """
    if core.facts.labels:
        return _by_cross_encoder(core, pairs, instruction, truncate)
    if core.plan.model.is_embedding:
        return _by_vectors(core, pairs, instruction, truncate)
    return _by_words(core, pairs, instruction or INSTRUCTION, truncate)


def probabilities(scores: Sequence[float], activation: str) -> list[float] | None:
    """Return the labels' probabilities, or None if the model's scores are not meant as probabilities."""
    if activation == "sigmoid":
        return [_sigmoid(score) for score in scores]
    if activation == "softmax":
        highest = max(scores)
        parts = [math.exp(score - highest) for score in scores]
        return [part / sum(parts) for part in parts]
    return None


def vector_of(chunks: Sequence[Chunk]) -> list[float]:
    """Return the vector of an answer. Raises `InvalidRequest` if the request was aborted."""
    [chunk] = chunks
    if chunk.embedding is None:
        raise InvalidRequest("The request was aborted before its result was computed.")
    return chunk.embedding


def _by_cross_encoder(
    core: EngineCore, pairs: Pairs, instruction: str | None, truncate: bool | None
) -> tuple[list[Request], Scores]:
    labels, activation = core.facts.labels, core.facts.score_activation
    if len(labels) != 1:
        raise InvalidRequest(f"This model has {len(labels)} labels; ranking needs a model with one. Use /classify.")
    if core.facts.is_encoder:
        _refuse_instruction(instruction)
        requests = [Request(text=first, second_text=second) for first, second in pairs]
    else:
        _refuse_truncate(truncate)
        instruction, truncate = instruction or INSTRUCTION, False
        requests = [Request(text=_prompt(core, pair, instruction), add_special_tokens=False) for pair in pairs]

    def scores(answers: Answers) -> list[float]:
        vectors = [vector_of(chunks) for chunks in answers]
        return [(probabilities(score, activation) or score)[0] for score in vectors]

    return vector_requests(requests, core, truncate=truncate), scores


def _by_vectors(
    core: EngineCore, pairs: Pairs, instruction: str | None, truncate: bool | None
) -> tuple[list[Request], Scores]:
    """Request one vector per distinct text.

    If the checkpoint has a prompt named "query" or "document", it is put before the queries or documents.
    """
    _refuse_instruction(instruction)
    prompts, requests, numbers = core.facts.prompts, [], []
    for side, name in enumerate(("query", "document")):
        texts = dict.fromkeys(pair[side] for pair in pairs)
        indices = {text: len(requests) + index for index, text in enumerate(texts)}
        text_requests = [Request(text=text) for text in texts]
        prompt_name = name if name in prompts else None
        requests += vector_requests(text_requests, core, prompt_name=prompt_name, truncate=truncate)
        numbers.append([indices[pair[side]] for pair in pairs])

    def scores(answers: Answers) -> list[float]:
        vectors = [_normalized(vector_of(chunks)) for chunks in answers]
        return [float(vectors[first] @ vectors[second]) for first, second in zip(*numbers, strict=True)]

    return requests, scores


def _by_words(core: EngineCore, pairs: Pairs, instruction: str, truncate: bool | None) -> tuple[list[Request], Scores]:
    _refuse_truncate(truncate)
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer, so it cannot rank texts.", param="query")
    encoded = core.tokenizer.encode_batch(WORDS, add_special_tokens=False)
    if any(len(ids) != 1 for ids in encoded):
        raise InvalidRequest('This model cannot rank: "yes" and "no" are not single tokens of its vocabulary.')
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
        logprobs = [requested_logprobs(chunks) for chunks in answers]
        return [_sigmoid(yes - no) for yes, no in logprobs]

    return requests, scores


def requested_logprobs(chunks: Sequence[Chunk]) -> list[float]:
    """Return the log-probability of each requested token id at the first output token, in the order of the request."""
    [chunk] = chunks
    pairs = chunk.logprobs.requested[0] if chunk.logprobs is not None and chunk.logprobs.requested else None
    if pairs is None:
        raise InvalidRequest("The request was aborted before its result was computed.")
    return [logprob for logprob, _ in pairs]


def _prompt(core: EngineCore, pair: tuple[str, str], instruction: str) -> str:
    query, document = pair
    question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": question}]
    from serve.calls.chat.prepare import render  # slow to import: loads all chat parsers
    from serve.calls.chat.request import ChatRequest

    return render(core, ChatRequest(messages=messages, template_kwargs={"enable_thinking": False}))


class CutsTexts(Protocol):
    """A body with the fields that decide whether texts that are too long are truncated."""

    @property
    def truncate(self) -> bool | None: ...

    @property
    def truncate_prompt_tokens(self) -> int | None: ...


def truncation(core: EngineCore, body: CutsTexts) -> bool | None:
    """Return whether texts that are too long are truncated, or None for the server's setting.

    vLLM's truncate_prompt_tokens -1 means true for encoders. For other models, which may read the texts in a chat
    prompt that is never truncated, it has no effect.
    """
    if body.truncate_prompt_tokens is not None and core.facts.is_encoder:
        return True
    return body.truncate


def _refuse_instruction(instruction: str | None) -> None:
    if instruction is not None:
        raise InvalidRequest("This model does not accept an instruction; remove it.", param="instruction")


def _refuse_truncate(truncate: bool | None) -> None:
    if truncate:
        raise InvalidRequest(
            "This model reads the texts in a chat prompt, which is never cut; remove truncate and shorten the texts.",
            param="truncate",
        )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _normalized(vector: Sequence[float]) -> np.ndarray:
    """Return the vector scaled to length 1, as float64 of shape [size]. A zero vector stays zero."""
    array = np.array(vector, dtype=np.float64)
    return array / (np.linalg.norm(array) or 1.0)
