"""`LLM`: vLLM's class for offline inference, on Penstock's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from runtime.errors import InvalidRequest
from serve.calls.vectors import shortened
from serve.python.sampling import SamplingParams
from serve.python.sync_engine import SyncEngine
from serve.python.tokens import TokenizerView
from serve.vllm.arguments import EngineArgs, EngineSettings
from serve.vllm.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from serve.vllm.generate import DEFAULT_TOKENS, Caller, prompts_counted
from serve.vllm.llm_engine import LLMEngine
from serve.vllm.metrics import Metric, read_metrics
from serve.vllm.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from serve.vllm.prompts import LoRARequest, Prompts, prompts_of

MAX_AT_ONCE = 1024  # prompts in one call to the engine


class LLM:
    """An engine with the interface of vLLM's `LLM`. The constructor loads the model, and all calls block.

        llm = LLM(model="...")
        for output in llm.generate(["Hello", "Once"], SamplingParams(temperature=0, max_tokens=16)):
            print(output.outputs[0].text)

    The keywords are Penstock's options, or vLLM's names for them. Raises `ConfigurationError`, which lists every option
    that cannot be satisfied. The class also works in notebooks, because the engine's event loop runs in its own thread.
    The engine ends at `shutdown`, at the end of a `with` block, or with the process. `use_tqdm` in a call shows a
    progress bar.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        settings = EngineSettings.of({"model": model, **keywords})
        self._profiler = settings.profiler
        self._caller = Caller.started(settings)
        self._engine = self._caller.engine
        self._stepped = LLMEngine(self._caller)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an engine with these arguments."""
        return cls(**engine_args.keywords)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End every request and release all resources."""
        self._engine.close()

    @property
    def engine(self) -> SyncEngine:
        """Penstock's engine, for features that vLLM's class does not have."""
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """An `LLMEngine` that uses the same engine."""
        return self._stepped

    def get_tokenizer(self) -> TokenizerView:
        """Return the tokenizer."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls without `sampling_params`."""
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

        A prompt is a text, a dict with `prompt` or `prompt_token_ids`, or a list of token ids. `sampling_params` and
        `lora_request` are one value for all prompts, or a list with one value per prompt. A `lora_request` is the name
        of a loaded adapter, or a `LoRARequest`, whose adapter is loaded at its first use. Raises `InvalidRequest` for
        invalid arguments.
        """
        texts = prompts_of(prompts)
        params = _one_each(sampling_params, len(texts), "sampling_params", alike=Mapping)
        loras = _one_each(lora_request, len(texts), "lora_request", alike=(LoRARequest, str))
        if priority is not None and len(priority) != len(texts):
            raise InvalidRequest(f"{len(texts)} prompts, but {len(priority)} priorities.", param="priority")
        return self._caller.generate(texts, params, progress=use_tqdm, loras=loras, priorities=priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer one chat (a list of messages) or several (a list of lists). Returns one `RequestOutput` per chat."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs or None}
        options |= {"chat_template": chat_template, "continue_final_message": continue_final_message or None}
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

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt, best first. Raises `InvalidRequest` for unsupported parameters."""
        tokenizer = self.get_tokenizer()
        ids = [tokenizer.encode(each) if isinstance(each, str) else each for each in prompts_of(prompts)]
        return beam_search(self._engine, ids, params, progress=use_tqdm)

    # --- pooling models ---

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str = "embed",
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return the result of a pooling model for each prompt: `output.outputs.data`, a tensor.

        `pooling_task` is "embed" or "classify". Raises `InvalidRequest` for other tasks, such as "token_embed".
        """
        if pooling_task == "embed":
            return self.embed(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm)
        if pooling_task != "classify":
            raise InvalidRequest(
                f"pooling_task={pooling_task!r} is not supported; embed and classify are.", param="pooling_task"
            )
        return self.classify(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm)

    def embed(
        self, prompts: Prompts, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt: `output.outputs.embedding`.

        If `pooling_params.dimensions` is set, each embedding is cut to this size, and scaled to length 1.
        """
        dimensions = None if pooling_params is None else pooling_params.dimensions
        return [
            PoolingRequestOutput(
                each["meta_info"]["id"], EmbeddingOutput(_shortened(each["embedding"], dimensions)), ids
            )
            for ids, each in self._pooled(self._engine.encode, prompts, use_tqdm)
        ]

    def classify(
        self, prompts: Prompts, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Return the label probabilities of each prompt: `output.outputs.probs`.

        If `pooling_params.use_activation` is False, `probs` has the scores before softmax or sigmoid instead.
        """
        raw = pooling_params is not None and pooling_params.use_activation is False
        return [
            PoolingRequestOutput(
                each["meta_info"]["id"],
                ClassificationOutput(each["embedding"] if raw else each["probs"] or each["embedding"]),
                ids,
            )
            for ids, each in self._pooled(self._engine.classify, prompts, use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return scores of how well texts match: `output.outputs.score`.

        If `data_1` is one text, it is compared with each text of `data_2`. Otherwise texts at the same index are
        compared. The prompt has a fixed format. Raises `InvalidRequest` if two lists differ in length, or
        if `chat_template` is set.
        """
        if chat_template is not None:
            raise InvalidRequest(
                "chat_template is not supported here; leave it out: the model's own form is used.",
                param="chat_template",
            )
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        calls: list[tuple[str, list[str]]]  # (query, texts to compare with it)
        if isinstance(data_1, str) or len(data_1) == 1:
            query = data_1 if isinstance(data_1, str) else data_1[0]
            calls = [(query, seconds[at : at + MAX_AT_ONCE]) for at in range(0, len(seconds), MAX_AT_ONCE)]
        else:
            if len(data_1) != len(seconds):
                raise InvalidRequest(f"{len(data_1)} texts, but {len(seconds)} to compare them with.", param="data_2")
            calls = [(first, [second]) for first, second in zip(data_1, seconds, strict=True)]
        scores: list[float] = []
        with prompts_counted(len(seconds), shown=use_tqdm) as done:
            for first, some in calls:
                ranked = sorted(self._engine.rerank(first, some), key=lambda each: each["index"])
                scores += [each["score"] for each in ranked]
                done(len(some))
        return [PoolingRequestOutput(str(index), ScoringOutput(score)) for index, score in enumerate(scores)]

    # --- management ---

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics. Raises `InvalidRequest` unless `disable_log_stats` was set to False."""
        return read_metrics(self._engine)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, and return True. If requests run or wait, keep the cache, and return False."""
        return self._engine.flush_cache()

    def start_profile(self) -> None:
        """Start profiling. The trace is written to `torch_profiler_dir` of `profiler_config`."""
        self._engine.start_profile(**self._profiler.options())

    def stop_profile(self) -> str:
        """Stop profiling, and return the path of the trace."""
        return self._engine.stop_profile()

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache until `wake_up`.

        Level 0 releases nothing and only pauses generation. With levels 1 and 2, `wake_up` reads the weights from the
        checkpoint's files again. If that is impossible, for example because a trainer has sent other weights, level 1
        writes the weights to a temporary file, and level 2 discards them: after `wake_up`, load weights with
        `engine.update_weights_from_disk`. Raises `InvalidRequest` for another level.
        """
        if level not in (0, 1, 2):
            raise InvalidRequest(f"level must be 0, 1 or 2, not {level!r}.", param="level")
        if level == 0:
            self._engine.pause_generation("in_place")
        else:
            self._engine.release_memory_occupation(keep=level == 1)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End `sleep`. `tags` selects some of "weights", "kv_cache" and "scheduling"; the default is all of them."""
        tags = ["weights", "kv_cache", "scheduling"] if tags is None else [*tags]
        memory = [tag for tag in tags if tag != "scheduling"]
        if memory:
            self._engine.resume_memory_occupation(memory)
        if "scheduling" in tags:
            self._engine.continue_generation()

    def collective_rpc(self, method: Any, *args: Any, **keywords: Any) -> Any:
        """Raise `InvalidRequest`, because workers do not run functions of the caller."""
        raise InvalidRequest(
            f"collective_rpc({method!r}) is not supported; llm.engine has methods to update, release and read weights.",
            param="method",
        )

    def _pooled(self, method: Any, prompts: Prompts, use_tqdm: bool) -> list[tuple[list[int], Any]]:
        texts = prompts_of(prompts)
        tokenizer = self.get_tokenizer()
        results = []
        several = len(texts) > MAX_AT_ONCE  # one progress bar counts the prompts of all calls
        with prompts_counted(len(texts), shown=use_tqdm and several) as done:
            for first in range(0, len(texts), MAX_AT_ONCE):
                some = texts[first : first + MAX_AT_ONCE]
                if all(isinstance(prompt, str) for prompt in some):
                    given: dict[str, Any] = {"prompt": some}
                else:
                    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in some]
                    given = {"input_ids": ids}
                results += method(**given, progress=use_tqdm and not several)
                done(len(some))
        known = (tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts)
        return list(zip(known, results, strict=True))


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """vLLM's parameters of pooling models.

    `dimensions` is the number of values to which embeddings are shortened. If `use_activation` is False, `classify`
    returns the scores before softmax or sigmoid instead of probabilities.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


def _shortened(vector: list[float], dimensions: int | None) -> list[float]:
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise InvalidRequest(f"dimensions must be 1 to {len(vector)}, not {dimensions}.", param="dimensions")
    return shortened(vector, dimensions)


def _one_each(value: Any, count: int, name: str, *, alike: Any) -> list[Any]:
    """Return one value per prompt. `value` is a list, or one value (None or an `alike`) for all prompts.

    Raises `InvalidRequest` if a list does not have `count` items.
    """
    if value is None or isinstance(value, alike):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{count} prompts, but {len(value)} {name}.", param=name)
    return [*value]
