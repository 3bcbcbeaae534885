"""`LLM`: an offline API like vLLM's, for scripts that were written for vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from runtime.errors import ConfigurationError, InvalidRequest
from runtime.sampling_params import MAX_CHOICES
from serve.python.arguments import as_json
from serve.python.results import Generated
from serve.python.sampling import SamplingParams
from serve.python.sync_engine import SyncEngine
from serve.python.tokens import TokenizerView

MAX_AT_ONCE = 1024  # prompts in one call to the engine
DEFAULT_TOKENS = 16  # vLLM's default for max_tokens
# vLLM's keywords -> Penstock's options. None: accepted without effect.
KEYWORDS: Mapping[str, str | None] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "block_size": "page_size",
    "seed": "random_seed",
    "enforce_eager": "disable_cuda_graph",
    "disable_log_stats": None,
}
Prompts = Any  # a text, {"prompt": text}, {"prompt_token_ids": ids}, ids, or a list of these


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token, its rank in the vocabulary (None if not known), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt.

    `logprobs` has one dict per token, from token id to `Logprob`, for the chosen token and the likeliest ones.
    `cumulative_logprob` is the sum over the chosen tokens. Both are None unless `logprobs` was set. `finish_reason` is
    "stop", "length" or "abort". `stop_reason` is the stop text or stop token id that ended the output, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label of a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts match, as a score."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of a pooling model for one prompt. `outputs` is an embedding, classification or scoring output."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int] = field(default_factory=list)
    finished: bool = True


class LLM:
    """The engine with the interface of vLLM's offline class: the constructor loads the model, and calls block.

        llm = LLM(model="...")
        for output in llm.generate(["Hello", "Once"], SamplingParams(temperature=0, max_tokens=16)):
            print(output.outputs[0].text)

    Keywords are Penstock's options, or vLLM's names of the options that both share. Raises `ConfigurationError`, which
    lists every option that cannot be satisfied. Notebooks can use it too, because its event loop runs in its own
    thread. The engine ends with `shutdown`, with its `with` block, or with the process.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._engine = SyncEngine(**_options({"model": model, **keywords}))
        self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End every request and release all resources."""
        self._engine.close()

    @property
    def engine(self) -> SyncEngine:
        """Penstock's own engine, with the features that vLLM's class does not have."""
        return self._engine

    def get_tokenizer(self) -> TokenizerView:
        """Return the tokenizer."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that a call without sampling parameters uses."""
        return SamplingParams(max_new_tokens=DEFAULT_TOKENS)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate from one prompt or a list of prompts. Returns one `RequestOutput` per prompt, in order.

        A prompt is a text, a dict with `prompt` or `prompt_token_ids`, or a list of token ids. `sampling_params` is one
        object for all prompts, or a list with one for each. `lora_request` is the name of a loaded adapter, or an
        object with the attribute `lora_name`. Raises `InvalidRequest`.
        """
        texts = _prompts(prompts)
        if sampling_params is not None and not isinstance(sampling_params, Mapping):
            if len(sampling_params) != len(texts):
                raise InvalidRequest(f"{len(texts)} prompts, but {len(sampling_params)} sampling_params.")
            every = list(sampling_params)
        else:
            every = [sampling_params] * len(texts)
        if priority is not None and len(priority) != len(texts):
            raise InvalidRequest(f"{len(texts)} prompts, but {len(priority)} priorities.", param="priority")
        tokenizer = self.get_tokenizer()
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]
        outputs: list[RequestOutput | None] = [None] * len(texts)
        for group in _groups(every, len(texts)):
            fields: dict[str, Any] = {"lora_path": getattr(lora_request, "lora_name", lora_request)}
            if priority is not None:
                fields["priority"] = [priority[index] for index in group]
            params = _with_defaults(every[group[0]])
            answers: Any = self._engine.generate(
                input_ids=[ids[index] for index in group],
                sampling_params=params,
                stream=False,
                progress=use_tqdm,
                **fields,
            )
            n = len(answers) // len(group)
            for place, index in enumerate(group):
                mine = answers[place * n : (place + 1) * n]
                outputs[index] = _request_output(texts[index], ids[index], mine, params)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer one chat (a list of messages) or several (a list of lists). Returns one `RequestOutput` per chat."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs or None}
        options |= {"continue_final_message": continue_final_message or None}
        tokenizer = self.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                chat,
                tokenize=True,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **options,
            )
            for chat in chats
        ]
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        for output in outputs:
            output.prompt = tokenizer.decode(output.prompt_token_ids)
        return outputs

    def embed(self, prompts: Prompts, *, use_tqdm: bool = True) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt: `output.outputs.embedding`."""
        return [
            PoolingRequestOutput(each["meta_info"]["id"], EmbeddingOutput(each["embedding"]), ids)
            for ids, each in self._pooled(self._engine.encode, prompts)
        ]

    encode = embed

    def classify(self, prompts: Prompts, *, use_tqdm: bool = True) -> list[PoolingRequestOutput]:
        """Return the label probabilities of each prompt: `output.outputs.probs`."""
        return [
            PoolingRequestOutput(each["meta_info"]["id"], ClassificationOutput(each["probs"] or each["embedding"]), ids)
            for ids, each in self._pooled(self._engine.classify, prompts)
        ]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Return scores of how well texts match: `output.outputs.score`.

        If `data_1` is one text, it is compared with each text of `data_2`; otherwise the lists are compared pair by
        pair. Raises `InvalidRequest` if two lists differ in length.
        """
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        if isinstance(data_1, str) or len(data_1) == 1:
            query = data_1 if isinstance(data_1, str) else data_1[0]
            ranked = self._engine.rerank(query, seconds)
        else:
            if len(data_1) != len(seconds):
                raise InvalidRequest(f"{len(data_1)} texts, but {len(seconds)} to compare them with.", param="data_2")
            ranked = []
            for index, (first, second) in enumerate(zip(data_1, seconds, strict=True)):
                [each] = self._engine.rerank(first, [second])
                ranked.append({**each, "index": index})
        in_order = sorted(ranked, key=lambda each: each["index"])
        return [PoolingRequestOutput(str(each["index"]), ScoringOutput(each["score"])) for each in in_order]

    def _pooled(self, method: Any, prompts: Prompts) -> list[tuple[list[int], Any]]:
        texts = _prompts(prompts)
        tokenizer = self.get_tokenizer()
        results = []
        for first in range(0, len(texts), MAX_AT_ONCE):
            some = texts[first : first + MAX_AT_ONCE]
            if all(isinstance(prompt, str) for prompt in some):
                answers = method(some)
            else:
                ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in some]
                answers = method(input_ids=ids)
            results += answers
        known = (tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts)
        return list(zip(known, results, strict=True))


def _options(keywords: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in keywords.items():
        own = KEYWORDS.get(name, name)
        if own is None or (name == "model" and value is None):
            continue
        if own in options:
            raise ConfigurationError(f"{own} is given twice.")
        options[own] = value
    return options


def _prompts(prompts: Prompts) -> list[str | list[int]]:
    """Return each prompt as a text or as ids."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    prompts = as_json(prompts) if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a text, ids or a list, not {type(prompts).__name__}.", param="prompts")
    if prompts and isinstance(prompts[0], int):
        return [_prompt(prompts)]
    return [_prompt(each) for each in prompts]


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown:
            raise InvalidRequest(f"A prompt has {min(unknown)}, which is not supported; only text and ids are.")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    return prompt if isinstance(prompt, str) else as_json(prompt)


def _groups(params: Sequence[Mapping[str, Any] | None], count: int) -> list[list[int]]:
    """Group the indices of prompts into calls with equal sampling parameters and a limited number of outputs."""
    groups: dict[int, list[int]] = {}
    for index in range(count):
        groups.setdefault(id(params[index]), []).append(index)
    most = MAX_AT_ONCE // 4 if any(each and each.get("n", 1) > 1 for each in params) else MAX_AT_ONCE
    most = min(most, max(1, 4096 // MAX_CHOICES)) if most != MAX_AT_ONCE else most
    return [group[first : first + most] for group in groups.values() for first in range(0, len(group), most)]


def _with_defaults(params: Mapping[str, Any] | None) -> SamplingParams:
    made = params.clone() if isinstance(params, SamplingParams) else SamplingParams(**(params or {}))
    if "max_new_tokens" not in made:
        made["max_new_tokens"] = DEFAULT_TOKENS
    return made


def _request_output(
    prompt: str | list[int], ids: list[int], answers: Sequence[Generated], params: SamplingParams
) -> RequestOutput:
    meta = answers[0].meta_info
    return RequestOutput(
        request_id=meta["id"],
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        prompt_logprobs=_logprobs(meta, "input", params.prompt_logprobs),
        outputs=[_completion(index, answer, params) for index, answer in enumerate(answers)],
        num_cached_tokens=meta["cached_tokens"],
    )


def _completion(index: int, answer: Generated, params: SamplingParams) -> CompletionOutput:
    reason = answer.meta_info["finish_reason"] or {}
    chosen = [each.logprob or 0.0 for each in answer.token_logprobs] if params.logprobs is not None else None
    matched = reason.get("matched")
    stops = {params.stop} if isinstance(params.stop, str) else {*params.stop}
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=answer.output_ids,
        cumulative_logprob=None if chosen is None else sum(chosen),
        logprobs=_logprobs(answer.meta_info, "output", params.logprobs),  # pyright: ignore[reportArgumentType]
        finish_reason=answer.finish_reason,
        stop_reason=matched if matched in stops or matched in {*params.stop_token_ids} else None,
    )


def _logprobs(meta: Mapping[str, Any], side: str, count: int | None) -> list[dict[int, Logprob] | None] | None:
    """Return, for each token, the log-probabilities of the chosen token and of the `count` likeliest tokens."""
    if count is None:
        return None
    chosen = meta.get(f"{side}_token_logprobs") or []
    tops = meta.get(f"{side}_top_logprobs") or [None] * len(chosen)
    found: list[dict[int, Logprob] | None] = []
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
