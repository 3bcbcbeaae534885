"""The engine from Python, for async code and notebooks; `serve.sync_engine` is the one for scripts."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import finalize

import anyio
import anyio.to_thread

from ops.machine import Machine
from runtime.actors.assemble import assemble, prepare
from runtime.actors.engine_core import EngineCore, Status
from runtime.actors.output_stream import read_all
from runtime.actors.scrape import exposition
from runtime.config import Args
from runtime.errors import ConfigurationError, EngineClosed, InvalidRequest, WrongEventLoop
from serve.background import BackgroundTask
from serve.decode import decode
from serve.demo import demo_path
from serve.native.classify import ClassifyBody, classified, classify_requests
from serve.native.generate import GenerateAnswers
from serve.native.profile import ProfileBody, profile_options
from serve.native.ranking import (
    RerankBody,
    ScoreBody,
    label_requests,
    label_scores,
    order,
    rank_documents,
)
from serve.native.schema import GenerateBody, requests_of
from serve.prompts import vector_requests

if TYPE_CHECKING:
    from serve.python_chat import Answer, Messages

Prompt = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]]
Piece = TypeVar("Piece")
Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Engine:
    """A language model in this process.

        async with Engine(model_path="...") as engine:
            answer = await engine.generate("Once upon a time", {"max_new_tokens": 32})
            async for piece in engine.stream("Once upon a time"):
                print(piece["delta"], end="")

    Keyword names are the names of the server's options; without `model_path` it serves the embedded demo
    model. Raises `ConfigurationError` with everything that cannot be done here. Cancelling a call, or leaving
    a stream's loop, frees what its request held. Use it on one event loop: calls from another raise `WrongEventLoop`.
    `aclose` ends all that it started; an engine that is forgotten ends too, with a `ResourceWarning`.

    On one device it computes in this process; only compilers run beside it, where kernels must be built. With
    `tp_size` or `pp_size` above 1 each further rank is a child process. Several ranks or replicas on one CPU share
    its cores: unless OMP_NUM_THREADS is set, torch's number of threads is lowered in this process and stays so.
    Nothing else outside the engine changes: no signal handler, logging configuration, start method or event loop
    policy.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        if model_path is not None:
            options["model_path"] = model_path
        for limit in ("max_queued_requests", "max_queued_tokens"):
            if options.get(limit) is None:
                options[limit] = sys.maxsize  # the caller's own process: a list of any length may wait
        self._init(Args.of(**options))

    @classmethod
    def of(cls, args: Args) -> Self:
        """An engine from parsed options."""
        engine = cls.__new__(cls)
        engine._init(args)
        return engine

    def _init(self, args: Args) -> None:
        self._life = EngineLife(args)
        self._task = BackgroundTask(self._life.run)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forgotten: finalize[..., Engine] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load the model; return when requests are taken. Cancelled or failed, nothing is left behind."""
        if self._task.running:
            raise EngineClosed("The engine is already started.")
        self._loop = asyncio.get_running_loop()
        try:
            await self._task.start()
        except ConfigurationError as error:  # it says all there is to say; where it was found helps nobody
            raise error.with_traceback(None) from None
        self._forgotten = finalize(self, _warn_and_end, self._task)
        self._forgotten.atexit = False

    async def aclose(self) -> None:
        """End every request and give back memory, threads and files. Does nothing the second time."""
        if self._task.running:
            self._check_loop()
        if self._forgotten is not None:
            self._forgotten.detach()
        await self._task.stop()
        self._life.core = None

    async def wait(self) -> None:
        """Wait until the engine ends; raises what ended it."""
        await self._task.wait()

    @property
    def core(self) -> EngineCore:
        """The engine core, as HTTP handlers use it. Raises `EngineClosed` before the start and after the end."""
        if self._life.core is None:
            raise EngineClosed("The engine is not running: use `async with Engine(...)`, or start it.")
        self._check_loop()
        return self._life.core

    def _check_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # plain code between two turns of a loop
            return
        if loop is not self._loop:
            raise WrongEventLoop(
                "This Engine was started on another event loop. Start one on this loop, call it with "
                "asyncio.run_coroutine_threadsafe, or use a SyncEngine, which may be called from anywhere."
            )

    # --- generating ---

    async def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        **options: Any,
    ) -> Any:
        """Answer one prompt with a dict, or a list of prompts (or n > 1 choices) with a list of dicts.

        Each holds `text`, `output_ids` and `meta_info`, as the native HTTP API returns them; `options` are
        that API's other fields (`return_logprob`, `rid`, ...). Raises `InvalidRequest` naming the parameter.
        """
        self.core.check_room()
        body = _body(prompt, sampling_params, input_ids, options)
        requests = requests_of(body, self.core)
        single = not body.is_batch and requests[0].sampling.n == 1
        answers = GenerateAnswers(self.core, requests, indexed=not single)
        found = answers.whole(await read_all(await self.core.submit_all(requests)))
        return found[0] if single else found

    async def stream(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The answer to one prompt, piece by piece.

        Each piece is a dict with the new text as `delta`, all text so far as `text`, the new ids as
        `output_ids`, and `meta_info`, whose `finish_reason` is None until the last piece. With n > 1 the
        choices interleave, distinguished by `index`. Leaving the loop frees the request.
        """
        self.core.check_room()
        body = _body(prompt, sampling_params, input_ids, options)
        if body.is_batch:
            raise InvalidRequest("stream takes one prompt; start one stream for each.", param="text")
        [request] = requests_of(body, self.core)
        answers = GenerateAnswers(self.core, [request], indexed=True)
        texts = [""] * request.sampling.n
        async with aclosing(self.core.submit(request).chunks()) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    [piece] = answers.whole([[chunk]])
                    texts[chunk.index] += chunk.text
                    yield {**piece, "delta": chunk.text, "text": texts[chunk.index], "index": chunk.index}

    async def chat(self, messages: Messages, **options: Any) -> Answer:
        """Answer messages (or one text of the user's): `answer.choices[0].message.content`.

            class City(pydantic.BaseModel): name: str; country: str
            answer = await engine.chat("Where is the Louvre?", response_format=City, max_tokens=64)
            answer.choices[0].message.parsed.country

        Keywords are the fields of /v1/chat/completions (`tools`, `tool_choice`, `temperature`, ...), the answer is its
        object as a dict with attributes. `response_format` may be a pydantic model: its object is then `parsed`, None
        where the output was cut off. Raises `InvalidRequest` naming the keyword.
        """
        from serve import python_chat  # imports all that parses tool calls and thoughts

        return await python_chat.chat(self.core, messages, options)

    async def chat_stream(self, messages: Messages, **options: Any) -> AsyncGenerator[Answer, None]:
        """The answer in chunks, as the HTTP API streams them: `piece.choices[0].delta.content`.

        Leaving the loop frees the request.
        """
        from serve import python_chat

        async with aclosing(python_chat.chat_stream(self.core, messages, options)) as pieces:
            async for piece in pieces:
                yield piece

    async def encode(
        self,
        prompt: Prompt | None = None,
        *,
        input_ids: Ids | None = None,
        rid: str | Sequence[str] | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
    ) -> Any:
        """The vector of one prompt as a dict, or of a list of prompts as a list of dicts. Nothing is generated.

        Each holds `embedding` (a list of floats; None where the request was aborted), and `meta_info`. It is pooled
        as the checkpoint says, else the hidden state of the prompt's last token scaled to length 1. Before a text
        comes the checkpoint's prompt of the name `prompt_name`; `truncate` cuts texts that are too long. Raises
        `InvalidRequest` naming the parameter.
        """
        self.core.check_room()
        body = _body(prompt, None, input_ids, {} if rid is None else {"rid": rid})
        requests = requests_of(body, self.core)
        requests = vector_requests(requests, self.core, prompt_name=prompt_name, truncate=truncate)
        answers = GenerateAnswers(self.core, requests, indexed=False)
        found = answers.embeddings(await read_all(await self.core.submit_all(requests)))
        return found if body.is_batch else found[0]

    async def classify(
        self,
        prompt: Prompt | None = None,
        *,
        pair: Prompt | None = None,
        input_ids: Ids | None = None,
        rid: str | Sequence[str] | None = None,
        truncate: bool | None = None,
    ) -> Any:
        """What a classifier or reward model makes of one prompt, as a dict, or of a list, as a list of dicts.

        Each holds `embedding` (the score of each label), `label` (the likeliest; None where there is one label),
        `probs` (None where the scores are not made to be probabilities) and `meta_info`. `pair` are second texts,
        one for each prompt. Raises `InvalidRequest` naming the parameter.
        """
        values = {"text": prompt, "text_pair": pair, "input_ids": input_ids, "rid": rid, "truncate": truncate}
        core = self.core
        core.check_room()
        read = partial(classify_requests, core)
        is_batch, requests = await anyio.to_thread.run_sync(
            lambda: read(decode(ClassifyBody, _given(values)))
        )
        answers = await read_all(await core.submit_all(requests))
        found = await anyio.to_thread.run_sync(classified, core, requests, answers)
        return found if is_batch else found[0]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The documents, or the best `top_n`, from the best to the worst: `index`, `score` and `document` of each.

        See `serve.ranking.rank` for how each kind of model scores. Raises `InvalidRequest` naming the parameter.
        """
        self.core.check_room()
        values = {"query": query, "documents": documents, "top_n": top_n}
        values |= {"instruction": instruction, "truncate": truncate}
        body = decode(RerankBody, _given(values))
        requests, scores = await anyio.to_thread.run_sync(rank_documents, self.core, body)
        answers = await read_all(await self.core.submit_all(requests))
        ranked = await anyio.to_thread.run_sync(order, body.texts, requests, scores, answers, body.top_n)
        return [{"index": each.index, "score": each.score, "document": each.text} for each in ranked]

    async def score(
        self,
        query: str | Sequence[int],
        items: Prompt | Ids,
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """For each item the probability of each label id as the next token behind query and item.

        With `apply_softmax` among the labels alone. Raises `InvalidRequest` naming the parameter.
        """
        values = {"query": query, "items": items, "label_token_ids": label_token_ids}
        values |= {"apply_softmax": apply_softmax, "item_first": item_first}
        core = self.core
        core.check_room()
        read = partial(label_requests, core)
        requests = await anyio.to_thread.run_sync(lambda: read(decode(ScoreBody, _given(values))))
        answers = await read_all(await core.submit_all(requests))
        return await anyio.to_thread.run_sync(partial(label_scores, answers, softmax=apply_softmax))

    # --- managing ---

    def abort(self, rid: str = "", *, abort_all: bool = False) -> int:
        """Abort the requests whose `rid` begins so, or all; returns how many."""
        return self.core.abort_all() if abort_all else self.core.abort_label(rid) if rid else 0

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests run."""
        return self.core.flush_cache()

    async def start_profile(self, **options: Any) -> None:
        """Profile the next steps; `options` are the fields of `/start_profile`, such as `num_steps`."""
        made = await anyio.to_thread.run_sync(profile_options, decode(ProfileBody, options))
        await self.core.start_profile(made)

    async def stop_profile(self) -> str:
        """End the profile -> the path of its Chrome trace, which ui.perfetto.dev and chrome://tracing show."""
        return str(await self.core.stop_profile())

    def status(self) -> Status:
        """Counts of requests, pages and tokens now, and in `kernels` what computes the model."""
        return self.core.status()

    def metrics(self) -> str:
        """The metrics as Prometheus reads them. Raises `NotFound` without `enable_metrics=True`."""
        return exposition(self.core).decode()


class EngineLife:
    """What runs from the start to the end. It knows nothing of the `Engine`, which can so be forgotten."""

    def __init__(self, args: Args) -> None:
        self._args = args
        self.core: EngineCore | None = None

    async def run(self, started: Callable[[], None]) -> None:
        prepared = partial(prepare, self._args, Machine.probe(), demo_path=demo_path())
        plan, facts = await anyio.to_thread.run_sync(prepared)
        if plan.parallel.node_rank:
            raise ConfigurationError(
                "Only the first machine (--node-rank 0) has an engine; start others from the command line."
            )
        self.core = await assemble(plan, facts)
        await self.core.run(started)


def _warn_and_end(task: BackgroundTask) -> None:
    """Nobody holds the engine any more, and nobody closed it."""
    if task.running:
        warnings.warn(
            "An Engine was forgotten without `aclose`; it is ended now.", ResourceWarning, stacklevel=2
        )
        task.abandon()


def _body(
    prompt: Prompt | None, sampling_params: Sampling | None, input_ids: Ids | None, options: Mapping[str, Any]
) -> GenerateBody:
    """The call as the native API's body, checked in the same way."""
    unknown = options.keys() - GenerateBody.__dataclass_fields__.keys() | options.keys() & {"stream"}
    if unknown:
        raise InvalidRequest(f"There is no option {', '.join(sorted(unknown))} here.", param=min(unknown))
    fields = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **options}
    return decode(GenerateBody, _given(fields))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was set, as JSON would have it."""
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """Lists for any sequence, dicts with strings as keys for any mapping, as JSON would have them."""
    if isinstance(value, str | bytes | int | float):  # first: the next two look through the abstract classes
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return value
