"""The engine's Python API for async code and notebooks. `serve.python.sync_engine` is for synchronous code."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from weakref import finalize

import anyio
import anyio.to_thread

import serve
from ops.machine import Machine
from runtime.actors.assemble import assemble, prepare
from runtime.actors.engine_core import EngineCore
from runtime.actors.generation_pause import mode_of
from runtime.actors.output_stream import read_all
from runtime.actors.scrape import exposition
from runtime.actors.status import Status
from runtime.actors.storage import Attachment
from runtime.config import Args
from runtime.distributed.numa import bound
from runtime.errors import ConfigurationError, EngineClosed, InvalidRequest, WrongEventLoop
from serve.background import BackgroundTask
from serve.calls.adapters import adapters_answer, load_adapter, load_adapter_from_tensors
from serve.calls.corpora import AddCorpusBody, add_corpus, list_corpora, remove_corpus
from serve.calls.decode import decode
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.generate.schema import GenerateBody, requests_of
from serve.calls.occupation import pause, resume, tags_of
from serve.calls.profile import ProfileBody, profile_options
from serve.calls.prompts import check_parts, vector_requests
from serve.calls.scores.classify import ClassifyBody, classified, classify_requests
from serve.calls.scores.rerank import RerankBody, order, rank_documents
from serve.calls.scores.score import ScoreBody, label_requests, label_scores
from serve.calls.server_info import info_of
from serve.calls.weights import (
    DestroyGroupBody,
    ReadWeightBody,
    UpdateGroupBody,
    WeightsCheckerBody,
    WeightsFromDiskBody,
    WeightsFromGroupBody,
    check_weights,
    close_group,
    open_group,
    read_weight,
    update_weights_from_disk,
    update_weights_from_group,
    update_weights_from_tensors,
)
from serve.demo import demo_path
from serve.python import watch
from serve.python.arguments import Ids, Prompt, Sampling, as_json, divided, generate_body, set_values
from serve.python.display import briefly_interrupted
from serve.python.generation import Generation
from serve.python.hooks import OnLogits, OnStep, OnToken, observe_steps, observe_tokens, tokens_observed, with_hook
from serve.python.html import HtmlView
from serve.python.options import plain_options, with_signature
from serve.python.progress import progress_over
from serve.python.results import Batch, Encoded, Fields, Generated, Piece
from serve.python.streams import Stream, account_of, pieces_of
from serve.python.templates import RequestTemplates
from serve.python.tokens import TokenizerView

if TYPE_CHECKING:
    from runtime.actors.weight_control import WeightControl
    from serve.python.chat import Answer, Messages


@with_signature
class Engine:
    """A language model in this process.

        async with Engine(model_path="...") as engine:
            answer = await engine.generate("Once upon a time", {"max_new_tokens": 32})
            async for piece in engine.stream("Once upon a time"):
                print(piece["delta"], end="")

    Keywords are the server's command-line options, with underscores. Without `model_path`, the engine serves the
    embedded demo model. Raises `ConfigurationError`, which lists every option that this machine cannot satisfy.

    Cancelling a call, or leaving a stream's loop, frees the resources of its request. Use the engine on one event loop:
    calls from another loop raise `WrongEventLoop`. `aclose` ends everything that the engine started. An engine that is
    garbage-collected without `aclose` is ended with a warning.

    On one device, the engine computes in this process, and starts child processes only to compile kernels. With
    `tp_size` or `pp_size` above 1, each rank except the first is a child process. If several ranks or replicas share a
    CPU and OMP_NUM_THREADS is not set, the engine permanently lowers torch's number of threads in this process. It
    changes no other state of the process, such as signal handlers, logging, the start method or the event loop policy.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        options = plain_options(model_path, options)
        for limit in ("max_queued_requests", "max_queued_tokens"):
            if options.get(limit) is None:
                options[limit] = sys.maxsize  # no limit, because only the caller's own process uses the queue
        self._init(Args.of(**options))

    @classmethod
    def of(cls, args: Args) -> Self:
        """Return an engine with these parsed options."""
        engine = cls.__new__(cls)
        engine._init(args)
        return engine

    def _init(self, args: Args) -> None:
        self._life = EngineLife(args)
        self._task = BackgroundTask(self._life.run)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forgotten: finalize[..., Engine] | None = None
        self._views: list[watch.Watch] = []
        self.templates = RequestTemplates()  # shared by the requests of all generations and programs

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load the model, and return when the engine accepts requests.

        If loading fails or is cancelled, all resources are released. Raises `EngineClosed` if the engine is already
        started.
        """
        if self._task.running:
            raise EngineClosed("The engine is already started.")
        self._loop = asyncio.get_running_loop()
        try:
            await self._task.start()
        except ConfigurationError as error:  # without its traceback, because the message is complete
            raise error.with_traceback(None) from None
        self._forgotten = finalize(self, _warn_and_end, self._task)
        self._forgotten.atexit = False

    async def aclose(self) -> None:
        """End every request and release memory, threads and files. A second call does nothing."""
        if self._task.running:
            self._check_loop()
        if self._forgotten is not None:
            self._forgotten.detach()
        for view in self._views:
            view.stop()
        self._views.clear()
        await self._task.stop()
        self._life.core = None

    async def shutdown(self) -> None:
        """End the engine. The same as `aclose`, under the name that SGLang uses."""
        await self.aclose()

    async def wait(self) -> None:
        """Wait until the engine ends, and raise the error that ended it, if any."""
        await self._task.wait()

    @property
    def core(self) -> EngineCore:
        """The engine core, to which HTTP handlers and this class submit requests.

        Raises `EngineClosed` before the start and after the end.
        """
        if self._life.core is None:
            raise EngineClosed(
                "The engine is not running: use `async with Engine(...)`, or `await engine.start()`. In code without "
                "`await`, use SyncEngine, which starts by itself."
            )
        self._check_loop()
        return self._life.core

    def _check_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop is running: synchronous code may call this between two runs of the loop
            return
        if loop is not self._loop:
            raise WrongEventLoop(
                "This Engine was started on another event loop. Start one on this loop, call it with "
                "asyncio.run_coroutine_threadsafe, or use a SyncEngine, which accepts calls from any thread."
            )

    # --- generating ---

    @overload
    def generate(
        self,
        prompt: Prompt | Ids | None = ...,
        sampling_params: Sampling | None = ...,
        *,
        input_ids: Ids | None = ...,
        stream: Literal[True],
        **options: Any,
    ) -> Stream: ...
    @overload
    def generate(
        self,
        prompt: Prompt | Ids | None = ...,
        sampling_params: Sampling | None = ...,
        *,
        input_ids: Ids | None = ...,
        stream: Literal[False] = ...,
        progress: bool = ...,
        **options: Any,
    ) -> Coroutine[Any, Any, Any]: ...
    def generate(
        self,
        prompt: Prompt | Ids | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        progress: bool = False,
        on_logits: OnLogits | None = None,
        on_token: OnToken | None = None,
        **options: Any,
    ) -> Any:
        """Generate from one or several prompts. Returns a `Generated`, or a list of them for several outputs.

            answer = await engine.generate("Once upon a time", max_new_tokens=32, temperature=0)
            answers = await engine.generate(["One", "Two"], SamplingParams(max_new_tokens=32), progress=True)
            async for piece in engine.generate("Once upon a time", stream=True): print(piece.delta, end="")

        A `Generated` is a dict with `text`, `output_ids` and `meta_info`, as in the native HTTP API. Its keys are also
        attributes. A list of prompts, or n > 1, returns a list. A prompt is a text, or token ids as a list, array or
        tensor.

        `options` are sampling parameters and fields of `/generate` (`return_logprob`, `rid`, ...). `progress` shows a
        bar that counts finished prompts. `on_logits(ids, logits)` is called before each token is sampled; it changes
        the logits (float32 [V]) in place, or returns new logits, and the step waits for it. `on_token(event)` is called
        with each `TokenEvent`. Raises `InvalidRequest`, whose `param` is the name of the argument.
        """
        _ = self.core  # raises here if the engine does not run; a coroutine that is not awaited would not raise
        if stream:
            if on_token is not None or progress:
                raise InvalidRequest(
                    "on_token and progress are for calls without stream=True; a stream has the tokens."
                )
            return Stream(self.stream(prompt, sampling_params, input_ids=input_ids, on_logits=on_logits, **options))
        read = partial(generate_body, prompt, sampling_params, input_ids, options)
        return self._generate(read, progress, on_logits, on_token)

    @briefly_interrupted
    async def _generate(
        self,
        read: Callable[[], GenerateBody],
        progress: bool,
        on_logits: OnLogits | None,
        on_token: OnToken | None,
    ) -> Any:
        core = self.core  # checked again: the coroutine may be awaited on another event loop
        core.check_queue_space()
        body = read()
        requests = with_hook(requests_of(body, core), on_logits)
        single = not body.is_batch and requests[0].sampling.n == 1
        answers = GenerateAnswers(core, requests, indexed=not single)
        streams = await core.submit_all(requests)
        answers.follow(streams)
        with progress_over(streams, shown=progress), tokens_observed(core, on_token, requests):
            values = answers.whole(await read_all(streams))
        page_size, results, n = core.plan.cache.page_size, Batch(), requests[0].sampling.n
        for number, each in enumerate(values):
            request, stream = requests[number // n], streams[number // n]
            if not single:
                each["index"] = number
            results.append(Generated(each, prompt=request.text, account=account_of(stream, each, page_size)))
        return results[0] if single else results

    async def async_generate(self, *args: Any, **options: Any) -> Any:
        """The same as `generate`, under SGLang's name. If `stream` is true, the result is a `Stream`."""
        return await self.generate(*args, **options)

    async def stream(
        self,
        prompt: Prompt | Ids | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        on_logits: OnLogits | None = None,
        **options: Any,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the outputs of one or several prompts, piece by piece.

        Each `Piece` is a dict: `delta` is the new text, `text` the whole text so far, `output_ids` the new token ids,
        and `meta_info["finish_reason"]` is None until the last piece. With several prompts or n > 1, the pieces of all
        outputs interleave, and `index` is the number of the output, counted over all prompts. Leaving the loop aborts
        the requests and frees their memory. Raises `InvalidRequest`, whose `param` is the name of the argument.
        """
        core = self.core
        core.check_queue_space()
        requests = requests_of(generate_body(prompt, sampling_params, input_ids, options), core)
        for request in requests:
            routed = request.experts_from is not None
            check_parts(hidden=request.returns_hidden, routed=routed, num_choices=1, stream=True)
        async with aclosing(pieces_of(core, with_hook(requests, on_logits))) as pieces:
            async for piece in pieces:
                yield piece

    def open(
        self,
        prompt: str | Ids,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        logprobs: bool = False,
        heal: bool = False,
        on_logits: OnLogits | None = None,
        **options: Any,
    ) -> Generation:
        """Return a `Generation`: a prompt that can be continued, forked, rewound and scored step by step.

        `logprobs`: tokens carry their log-probabilities. `heal`: sample the last token of the prompt again, from the
        tokens whose text begins with its text; use it if the prompt may end in the middle of a word. `options` are
        sampling parameters and fields of a request, as in `generate`. The first call of the `Generation` computes the
        prompt. Raises `InvalidRequest` if the prompt is empty.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_json(prompt)
        sampling, fields = divided(sampling_params, options)
        if not ids:
            raise InvalidRequest("The prompt must not be empty.", param="prompt")
        made = Generation(self, ids, sampling, options=fields, logprobs=logprobs, heal=heal)
        made.on_logits = on_logits
        return made

    def load(self, saved: Mapping[str, Any] | str | PathLike[str]) -> Generation:
        """Load a generation. `saved` is the result of `Generation.save`, or the path of the file that it wrote."""
        return Generation.load(self, saved if isinstance(saved, Mapping) else fspath(saved))

    @briefly_interrupted
    async def chat(self, messages: Messages, **options: Any) -> Answer:
        """Answer a chat. `messages` is a list of messages, or the text of one user message.

            answer = await engine.chat("Where is the Louvre?")
            answer.choices[0].message.content

            class City(pydantic.BaseModel): name: str; country: str
            answer = await engine.chat("Where is the Louvre?", response_format=City, max_tokens=64)
            answer.choices[0].message.parsed.country

        Keywords are the fields of /v1/chat/completions (`tools`, `tool_choice`, `temperature`, ...). The answer has the
        form of this route's answer: a dict whose keys are also attributes. If `response_format` is a pydantic model,
        `parsed` is an instance of it, or None if the output was truncated or calls tools. Raises `InvalidRequest`,
        whose `param` is the name of the keyword.
        """
        from serve.python import chat  # slow to import: loads all chat parsers

        return await chat.chat(self.core, messages, options)

    async def chat_stream(self, messages: Messages, **options: Any) -> AsyncGenerator[Answer, None]:
        """Yield the answer in chunks, as the HTTP API streams them: `piece.choices[0].delta.content`.

        Leaving the loop aborts the request and frees its memory.
        """
        from serve.python import chat

        async with aclosing(chat.chat_stream(self.core, messages, options)) as pieces:
            async for piece in pieces:
                yield piece

    async def encode(
        self,
        prompt: Prompt | None = None,
        *,
        input_ids: Ids | None = None,
        rid: str | Sequence[str] | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        progress: bool = False,
    ) -> Any:
        """Embed one prompt (returns a dict) or a list of prompts (returns a list of dicts).

        Each dict has `embedding` (a list of floats; None if the request was aborted) and `meta_info`. The checkpoint
        sets the pooling. The default is the last token's hidden state, scaled to length 1. `prompt_name` selects one of
        the checkpoint's prompts, which is put before each text. `truncate` cuts texts that are longer than the context.
        `progress` shows a bar that counts finished prompts. Raises `InvalidRequest`, whose `param` is the name of the
        argument.
        """
        self.core.check_queue_space()
        options = {name: value for name, value in (("rid", rid), ("lora_path", lora_path)) if value is not None}
        body = generate_body(prompt, None, input_ids, options)
        requests = requests_of(body, self.core)
        requests = vector_requests(requests, self.core, prompt_name=prompt_name, truncate=truncate)
        answers = GenerateAnswers(self.core, requests, indexed=False)
        streams = await self.core.submit_all(requests)
        with progress_over(streams, shown=progress):
            results = [Encoded(each) for each in answers.embeddings(await read_all(streams))]
        return results if body.is_batch else results[0]

    async def classify(
        self,
        prompt: Prompt | None = None,
        *,
        pair: Prompt | None = None,
        input_ids: Ids | None = None,
        rid: str | Sequence[str] | None = None,
        truncate: bool | None = None,
        progress: bool = False,
    ) -> Any:
        """Classify one prompt (returns a dict) or a list of prompts (returns a list of dicts).

        Each dict has `embedding` (the score of each label), `label` (the most likely label; None for models with one
        label), `probs` (None if the scores are not probabilities) and `meta_info`. `pair` gives a second text for each
        prompt, for models that classify pairs. `progress` shows a bar that counts finished prompts. Raises
        `InvalidRequest`, whose `param` is the name of the argument.
        """
        values = {"text": prompt, "text_pair": pair, "input_ids": input_ids, "rid": rid, "truncate": truncate}
        core = self.core
        core.check_queue_space()
        read = partial(classify_requests, core)
        is_batch, requests = await anyio.to_thread.run_sync(lambda: read(decode(ClassifyBody, set_values(values))))
        streams = await core.submit_all(requests)
        with progress_over(streams, shown=progress):
            answers = await read_all(streams)
        results = [Encoded(each) for each in await anyio.to_thread.run_sync(classified, core, requests, answers)]
        return results if is_batch else results[0]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool | None = None,
    ) -> list[Fields]:
        """Return the documents, best first, or only the best `top_n`. Each has `index`, `score` and `document`.

        `serve.calls.scores.ranking.rank` describes how each kind of model scores. Raises `InvalidRequest`, whose
        `param` is the name of the argument.
        """
        self.core.check_queue_space()
        values = {"query": query, "documents": documents, "top_n": top_n}
        values |= {"instruction": instruction, "truncate": truncate}
        body = decode(RerankBody, set_values(values))
        requests, scores = await anyio.to_thread.run_sync(rank_documents, self.core, body)
        answers = await read_all(await self.core.submit_all(requests))
        ranked = await anyio.to_thread.run_sync(order, body.texts, requests, scores, answers, body.top_n)
        return [Fields({"index": each.index, "score": each.score, "document": each.text}) for each in ranked]

    async def score(
        self,
        query: str | Sequence[int],
        items: Prompt | Ids,
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Return, for each item, the probability of each label id as the next token after the query and the item.

        With `apply_softmax`, the probabilities of the labels add up to 1. With `item_first`, the item precedes the
        query. Raises `InvalidRequest`, whose `param` is the name of the argument.
        """
        values = {"query": query, "items": items, "label_token_ids": label_token_ids}
        values |= {"apply_softmax": apply_softmax, "item_first": item_first}
        core = self.core
        core.check_queue_space()
        read = partial(label_requests, core)
        requests = await anyio.to_thread.run_sync(lambda: read(decode(ScoreBody, set_values(values))))
        answers = await read_all(await core.submit_all(requests))
        return await anyio.to_thread.run_sync(partial(label_scores, answers, softmax=apply_softmax))

    # --- hooks ---

    def on_logits(self, function: OnLogits) -> Callable[[], None]:
        """Call `function(ids, logits)` before each token of every later request, including HTTP requests.

        `function` changes the logits as `on_logits` of `generate` does. If a request has its own `on_logits`, that
        function is called after this one. If `function` raises, only the request whose logits it received ends,
        with an error. Returns a function that removes this hook. Raises `InvalidRequest` if another hook is
        active.
        """
        if not callable(function):
            raise InvalidRequest("on_logits must be a function of (ids, logits).", param="on_logits")
        return self.core.hook_logits(function)

    def on_token(self, function: OnToken) -> Callable[[], None]:
        """Call `function` with each `TokenEvent` of all requests. Returns a function that removes this hook.

        `function` runs on the event loop and must return quickly, because the tokens of all requests wait for it. If
        it raises, it is removed.
        """
        return observe_tokens(self.core, function, None)

    def on_step(self, function: OnStep) -> Callable[[], None]:
        """Call `function` with a `StepEvent` after each step. Returns a function that removes this hook.

        `function` runs on the event loop and must return quickly, because the results of the next step wait for it. If
        it raises, it is removed. Raises `InvalidRequest` if another function or a live view is active.
        """
        return observe_steps(self.core, function)

    # --- serving ---

    def serve(self, port: int = 0, *, host: str = "127.0.0.1") -> Any:
        """Return an HTTP server for this engine, with all of Penstock's routes. Await the result to start the server.

            server = await engine.serve(port=8000)   # `await server.stop()` ends it
            async with engine.serve() as server: print(server.url)

        With `port` 0, the system chooses a free port. The result is an `HttpServer`, as from `serve.http_server`.
        Awaiting it raises `ConfigurationError` if the port cannot be used.
        """
        return serve.http_server(self, host=host, port=port)  # imported lazily: HTTP is a layer above this module

    # --- seeing ---

    def __repr__(self) -> str:
        core = self._life.core
        state = "not running" if core is None else core.status().state
        return f"<{type(self).__name__} {self._life.path}, {state}>"

    def _repr_html_(self) -> str:
        return watch.engine_html(self._life.core, self._life.path)

    def watch(self, *, per_second: float = 2.0) -> watch.Watch:
        """Return a live view for a notebook: steps, queue, KV cache pages, latest requests, and why requests wait.

        The view ends with the engine, or when its `stop` is called. `per_second` is the highest rate of updates. Raises
        `InvalidRequest` while another view or `on_step` is active.
        """
        view = watch.Watch(self.core, per_second=per_second)
        self._views.append(view)
        return view

    def why_waiting(self, rid: str | None = None) -> list[str]:
        """Return, for each waiting request or for the request `rid`, one line that says why the request waits."""
        return watch.why_waiting(self.core, rid)

    def prefix_tree(self) -> HtmlView:
        """Return a view of the prefix tree: each node's number of pages, and the number of requests that use them."""
        return HtmlView(watch.tree_html(self.core))

    # --- management ---

    def abort(self, rid: str = "", *, abort_all: bool = False) -> int:
        """Abort the requests whose id starts with `rid`, or all requests. Returns the number of aborted requests."""
        return self.core.abort_all() if abort_all else self.core.abort_label(rid) if rid else 0

    def open_session(self, capacity_of_str_len: int, session_id: str | None = None) -> str:
        """Open a session of at most `capacity_of_str_len` tokens. Returns the id to pass in `session_params`."""
        return self.core.sessions.open(capacity_of_str_len, session_id)

    def close_session(self, session_id: str) -> None:
        """Close a session and delete its tokens."""
        self.core.sessions.close(session_id)

    async def attach_storage(self, backend: str, config: Mapping[str, Any] | None = None) -> None:
        """Attach a storage backend to the host tier of the KV cache, as `PUT /hicache/storage-backend` does."""
        await self.core.attach_storage(Attachment(backend, config or {}))

    async def detach_storage(self) -> None:
        """Detach the storage backend. Its stored pages are kept."""
        await self.core.detach_storage()

    async def clear_storage(self) -> None:
        """Remove all pages of this model from the storage backend."""
        await self.core.clear_storage()

    def flush_cache(self) -> bool:
        """Empty the prefix cache, and return True. If requests run or wait, do nothing, and return False."""
        return self.core.flush_cache()

    async def update_weights_from_disk(self, model_path: str, **options: Any) -> dict[str, Any]:
        """Replace the weights with those of another checkpoint of the same model. Requests continue meanwhile.

        `options` are the fields of `/update_weights_from_disk`: `load_format`, `flush_cache`, `abort_all_requests`,
        `weight_version`. Returns the answer of this route. If the weights cannot be replaced, keeps the old weights,
        and raises `InvalidRequest` or `CheckpointError`.
        """
        body = decode(WeightsFromDiskBody, {"model_path": model_path, **options})
        return Fields(await update_weights_from_disk(self.core, body))

    async def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> dict[str, Any]:
        """Replace weights with tensors of this process: a dict, or pairs, of checkpoint names and tensors.

        Requests continue. The tensors may be a part of the model's tensors. If one does not fit, keeps the old weights,
        and raises `CheckpointError`. Returns the answer of `/update_weights_from_tensor`.
        """
        return await update_weights_from_tensors(self.core, named_tensors, flush_cache, weight_version)

    @asynccontextmanager
    async def updating(
        self, *, weight_version: str | None = None, flush_cache: bool = True, partial: bool = False
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Replace the weights with a trainer's tensors, all at once when the block ends.

            async with engine.updating(weight_version="step-7") as update:
                await update.load(model.named_parameters())

        `load` may be called several times. Requests use the old weights until the block ends, and then the new weights.
        Every tensor of the model must be loaded, unless `partial` is true. Raises `CheckpointError` if a tensor is
        missing or does not fit. After any error, including an exception in the block, the old weights stay.
        """
        weights = self.core.weights
        await weights.begin()
        try:
            yield WeightUpdate(weights)
        except BaseException:
            await weights.cancel()
            raise
        await weights.finish(flush=flush_cache, version=weight_version, whole=not partial)

    async def init_weights_update_group(self, master_address: str, master_port: int, **options: Any) -> dict[str, Any]:
        """Join a process group with a trainer. `options` are the fields of `/init_weights_update_group`."""
        values = {"master_address": master_address, "master_port": master_port, **options}
        return await open_group(self.core, decode(UpdateGroupBody, values))

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> dict[str, Any]:
        """Leave a process group that was joined with `init_weights_update_group`."""
        return await close_group(self.core, decode(DestroyGroupBody, {"group_name": group_name}))

    async def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], **options: Any
    ) -> dict[str, Any]:
        """Receive tensors from rank 0 of a process group, and replace weights with them.

        `options` are the fields of `/update_weights_from_distributed`. Returns the answer of this route.
        """
        values = {"names": as_json(names), "dtypes": as_json(dtypes), "shapes": as_json(shapes), **options}
        return await update_weights_from_group(self.core, decode(WeightsFromGroupBody, values))

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first `truncate_size` rows of a tensor of the checkpoint, as nested lists."""
        return await read_weight(self.core, decode(ReadWeightBody, {"name": name, "truncate_size": truncate_size}))

    async def weights_checker(self, action: str) -> dict[str, Any]:
        """Run "snapshot", "compare", "checksum" or "reset_tensors" on the weights, as `/weights_checker` does."""
        return await check_weights(self.core, decode(WeightsCheckerBody, {"action": action}))

    async def release_memory_occupation(self, tags: Sequence[str] | None = None, *, keep: bool = True) -> None:
        """Give memory back to the system: `tags` may contain "weights" and "kv_cache"; None means both.

        Requests wait until `resume_memory_occupation` has allocated the memory again. Weights that cannot
        be read from the checkpoint's files again, such as a trainer's, are written to a temporary file. If `keep` is
        false, such weights are discarded, and the caller must load weights again.
        """
        await self.core.weights.release(tags_of(tags), keep=keep)

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the released memory again, and restore the weights."""
        await self.core.weights.resume(tags_of(tags))

    async def pause_generation(self, mode: str = "abort") -> None:
        """Pause generation between two steps.

        `mode` "abort" ends all requests, "wait" lets them finish first, "retract" moves running requests back to the
        queue and frees their pages, and "in_place" keeps requests and pages. Raises `InvalidRequest` for another mode.
        """
        if mode not in ("abort", "wait", "retract", "in_place"):
            raise InvalidRequest("mode must be abort, wait, retract or in_place.", param="mode")
        await pause(self.core, mode_of(mode))

    async def continue_generation(self) -> None:
        """Resume generation after `pause_generation`."""
        await resume(self.core)

    async def add_external_corpus(self, **options: Any) -> dict[str, Any]:
        """Add a corpus of texts, from which NGRAM proposes draft tokens.

        `options` are the fields of `/add_external_corpus`: `corpus_id`, and one of `file_path`, `documents` and
        `token_chunks`. Returns the answer of this route. Raises `InvalidRequest` if the corpus cannot be used.
        """
        return await add_corpus(self.core, decode(AddCorpusBody, options))

    async def remove_external_corpus(self, corpus_id: str) -> dict[str, Any]:
        """Remove a corpus. Raises `InvalidRequest` if no corpus has this id."""
        return await remove_corpus(self.core, corpus_id)

    def list_external_corpora(self) -> dict[str, Any]:
        """Return the answer of `/list_external_corpora`: `corpus_token_counts` maps ids to numbers of tokens."""
        return list_corpora(self.core)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> dict[str, Any]:
        """Load a LoRA adapter from a folder. A `pinned` adapter is never evicted from host memory or from its slot.

        Returns the answer of `/load_lora_adapter`: `success`, `error_message` and `loaded_adapters` (name -> path).
        """
        return await self._adapters_after(load_adapter(self.core, lora_name, str(lora_path), pinned=pinned))

    async def load_lora_adapter_from_tensors(
        self, lora_name: str, tensors: bytes, config_dict: Mapping[str, Any], pinned: bool = False
    ) -> dict[str, Any]:
        """Load a LoRA adapter from memory.

        `tensors` is the result of `safetensors.torch.save`, and `config_dict` the content of adapter_config.json.
        Returns the answer of `/load_lora_adapter`.
        """
        change = load_adapter_from_tensors(self.core, lora_name, config_dict, tensors, pinned=pinned)
        return await self._adapters_after(change)

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Unload a LoRA adapter. Requests that use it finish first. Returns the answer of `/unload_lora_adapter`."""
        return await self._adapters_after(self.core.adapters.unload(lora_name))

    async def _adapters_after(self, change: Awaitable[object]) -> dict[str, Any]:
        """Await a change of the adapters, and return the answer of its route, which also reports a refusal."""
        try:
            await change
        except InvalidRequest as error:
            return adapters_answer(self.core, error.message)
        return adapters_answer(self.core)

    async def start_profile(self, **options: Any) -> None:
        """Profile the next steps; `options` are the fields of `/start_profile`, for example `num_steps`."""
        profile = await anyio.to_thread.run_sync(profile_options, decode(ProfileBody, options))
        await self.core.start_profile(profile)

    async def stop_profile(self) -> str:
        """End the profile, and return the path of its Chrome trace (open it in ui.perfetto.dev or chrome://tracing)."""
        return str(await self.core.stop_profile())

    async def start_expert_distribution_record(self) -> None:
        """Record which experts each of the next steps uses. Requires `expert_distribution_recorder_mode`."""
        await self.core.start_expert_record()

    async def stop_expert_distribution_record(self) -> None:
        """Stop recording which experts the steps use."""
        await self.core.stop_expert_record()

    async def dump_expert_distribution_record(self) -> list[dict[str, Any]]:
        """Write the record of experts to files, clear it, and return one summary per file.

        A summary has "path", "num_steps", "average_utilization_rate", and "logical_count", which maps a layer's number
        to the list of its experts' token counts.
        """
        return await self.core.dump_expert_record()

    @property
    def tokenizer(self) -> TokenizerView:
        """The tokenizer: `encode`, `decode`, `apply_chat_template`, and `engine.tokenizer("text")`."""
        core = self.core
        if core.tokenizer is None:
            raise InvalidRequest("The engine was started without a tokenizer (skip_tokenizer_init).")
        return TokenizerView(core, core.tokenizer)

    def get_tokenizer(self) -> TokenizerView:
        """Return `tokenizer`. This is vLLM's name for it."""
        return self.tokenizer

    def get_server_info(self) -> Fields:
        """Return the resolved settings and the state of the engine, as the route `/get_server_info` does."""
        return Fields(info_of(self.core, serve.__version__))

    def status(self) -> Status:
        """Return the current counts of requests, pages and tokens, and the chosen `kernels`.

        Each count is an attribute, for example `num_running`. Printing the result shows the most important counts.
        """
        return self.core.status()

    def metrics(self) -> str:
        """Return the metrics in Prometheus's text format. Raises `NotFound` unless `enable_metrics` is true."""
        return exposition(self.core).decode()


class WeightUpdate:
    """A weight update in progress, from `Engine.updating`."""

    def __init__(self, weights: WeightControl) -> None:
        self._weights = weights

    async def load(self, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Stage tensors, under their names in the checkpoint. If a tensor does not fit, raises `CheckpointError`.

        An error that leaves the block of `Engine.updating` cancels the whole update.
        """
        await self._weights.update_from_tensors(dict(named_tensors), flush=True)


class EngineLife:
    """The state of a running engine. It has no reference to the `Engine`, which can therefore be garbage-collected."""

    def __init__(self, args: Args) -> None:
        self._args = args
        self.path = str(args.get("model_path") or "the demo model")
        self.core: EngineCore | None = None

    async def run(self, started: Callable[[], None]) -> None:
        prepared = partial(prepare, self._args, Machine.probe(), demo_path=demo_path())
        plan, facts = await anyio.to_thread.run_sync(prepared)
        if plan.parallel.node_rank:
            raise ConfigurationError(
                "Only the first machine (--node-rank 0) runs an engine; start the others from the command line."
            )
        with bound(plan.parallel.numa_nodes):
            self.core = await assemble(plan, facts)
            await self.core.run(started)


class ForgottenEngine(UserWarning):
    """The warning that an engine was garbage-collected while it was running."""


def _warn_and_end(task: BackgroundTask) -> None:
    """End an engine that was garbage-collected without `aclose`."""
    if task.running:
        # Python hides ResourceWarning by default, so this warning has its own class.
        warnings.warn("An Engine was deleted without `aclose`; it is ended now.", ForgottenEngine, stacklevel=2)
        task.abandon()
