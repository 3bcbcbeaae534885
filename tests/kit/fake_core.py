"""An engine core without a model: it says what the test wants, through the real detokenizer and output streams.

    core = fake_core.FakeCore(tokenizer, text="Once upon a time")      # every choice says this
    core = fake_core.FakeCore(tokenizer, held=True)                    # nothing moves until core.step()

Every step adds one token to every choice. Token number i (from 0) of a choice has the logprob -0.25 * (i + 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_tokenizers
from ops.machine import Machine
from runtime.actors.adapters import AdapterRegistry
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.engine_core import EngineCore
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.output_stream import OutputStream
from runtime.actors.sessions import Sessions
from runtime.actors.storage import NO_TIER, Attachment
from runtime.config import Args
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import LoraPlan, Plan, TokenizerPlan
from runtime.config.resolve import resolve
from runtime.errors import (
    CheckpointError,
    ContextOverflow,
    EngineClosed,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PenstockError,
)
from runtime.profile import ProfileOptions
from runtime.request import Delta, Finish, LogprobParams, Logprobs, Request, Usage
from runtime.tokenizer.tokenizer import Tokenizer

MODEL = "tiny-model"
CONTEXT = 512
TEXT = "Once upon a time a small engine lived beside a quiet river. Ein kleiner Ofen wärmt 🚀."


def load_tokenizer(directory: Path, kind: tiny_tokenizers.Kind = "byte_bpe") -> Tokenizer:
    """Write a tiny tokenizer with a chat template to `directory`, and load it."""
    tiny = tiny_tokenizers.write(directory, kind)
    facts = make_facts(vocab_size=tiny.vocab_size)
    text = TokenizerPlan(
        tokenizer_path=str(directory), mode="auto", trust_remote_code=False, revision=None, chat_template=None
    )
    return Tokenizer.load(text, facts)


def make_facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {
        "architecture": "TinyForCausalLM",
        "path": "/models/tiny",
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "hidden_size": 16,
        "vocab_size": 512,
        "context_length": CONTEXT,
        "dtype": "float32",
    }
    return ModelFacts(**given | changes)


def make_plan(*, tool_call_parser: str | None = None, reasoning_parser: str | None = None, **serve: Any) -> Plan:
    """Return the plan of a tiny model on a CPU. Keywords replace fields of its serve section."""
    args = Args.of(
        model_path="org/tiny",
        served_model_name=MODEL,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        random_seed=0,
        page_size=16,
        max_running_requests=8,
        max_queued_requests=64,
        skip_server_warmup=True,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    plan = resolve(args, Machine.named("cpu"), make_facts(path="org/tiny"))
    return replace(plan, serve=replace(plan.serve, **serve))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStatus:
    state: str = "ready"
    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    max_total_tokens: int = 4096
    gen_throughput: float = 0.0
    kernels: str = "C++ kernels of a test"
    hangs: bool = False
    queue_space: int = 64
    estimated_wait_s: float = 0.0


class FakePause:
    """A pause that has no steps to hold."""

    paused = False

    async def begin(self, mode: str) -> None:
        self.paused = True

    async def end(self) -> bool:
        was_paused, self.paused = self.paused, False
        return was_paused

    def retract(self) -> None:
        """Do nothing: no request holds pages."""


class FakeWeights:
    """The control of weights that do not exist: every update fails, and there is no memory to release."""

    released: frozenset[str] = frozenset()
    waiting = ()

    def __getattr__(self, name: str) -> Any:
        async def refuse(*arguments: object, **options: object) -> Any:
            raise InvalidRequest("There are no weights.")

        return refuse


class FakeCore:
    """A fake of `EngineCore`. `submitted` lists its requests, and `aborted` lists the ids of aborted requests.

    It is also its own scheduler, and every request runs immediately.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        text: str = TEXT,
        ids_of: Callable[[Request, int], list[int]] | None = None,
        facts: ModelFacts | None = None,
        held: bool = False,
        **serve: Any,
    ) -> None:
        self.plan = make_plan(**serve)
        self.facts = facts or make_facts()
        self.media = self.transcriber = None
        self.tokenizer: Any = tokenizer
        self.sessions = Sessions(None)
        self.attachment = None
        self.state = "ready"
        self.held = held
        self.submitted: list[Request] = []
        self.aborted: list[int] = []
        self.num_flushes = 0
        self.pause, self.weights, self.schedulers = FakePause(), FakeWeights(), ()
        self.refusal: Exception | None = None  # raised by the next calls of `submit`
        self.failure: PenstockError | None = None  # ends every request at its next step
        self.num_cached = 0
        self._ids_of = ids_of or (lambda request, index: self._encode(text))
        self.metrics = None
        self.request_log_level: int | None = None
        self._requests = LiveRequests()
        self._runs: dict[tuple[int, int], _Run] = {}
        self._stepping = False
        self._detokenizer = DetokenizerActor(tokenizer, self._requests)

    # --- called by handlers ---

    submit_all: Any = EngineCore.submit_all
    adapters = AdapterRegistry(LoraPlan(), list)  # off

    def check_queue_space(self) -> None:
        if isinstance(self.refusal, Overloaded):
            raise self.refusal

    def submit(self, request: Request) -> OutputStream:
        if self.refusal is not None:
            raise self.refusal
        if self.state == "draining":
            raise EngineClosed("The engine is draining.")
        self.submitted.append(request)
        prompt = list(request.ids) if request.ids is not None else self._encode(request.text or "")
        if any(not 0 <= token_id < self.facts.vocab_size for token_id in prompt):
            raise InvalidRequest(f"Token ids must be in [0, {self.facts.vocab_size}).", param="input_ids")
        live = self._requests.add(replace(request, ids=tuple(prompt)))
        if len(prompt) >= CONTEXT:
            error = ContextOverflow(f"The input ({len(prompt)} tokens) is too long.", param="text")
            self._requests.fail(request.id, error)
            return live.output
        live.scheduler = self
        for index in range(request.sampling.n):
            self._runs[request.id, index] = _Run(request, index, prompt, self._ids_of(request, index))
        self._step_soon()
        return live.output

    def abort_label(self, label: str, *, owner: str | None = None, exact: bool = False) -> int:
        return self._requests.abort_label(label, owner=owner, exact=exact)

    def abort_all(self) -> int:
        return self.abort_label("")

    async def drain(self) -> None:
        self.state = "draining"
        await self._requests.wait_idle()

    def close(self) -> None:
        """End every request as a shutdown of the engine does."""
        self._requests.fail_all(EngineClosed("The engine is shut down."))

    async def update_weights(self, path: str, load_format: str | None = None, **options: object) -> int:
        """Raise an error, because there is no checkpoint to load."""
        raise CheckpointError(f"There is no directory {path}.")

    async def start_profile(self, options: ProfileOptions) -> None:
        """Do nothing: there is nothing to profile."""

    async def stop_profile(self) -> str:
        """Return a path to which nothing was written."""
        return "nowhere"

    async def start_expert_record(self) -> None:
        pass

    async def stop_expert_record(self) -> None:
        pass

    async def dump_expert_record(self) -> list[dict[str, Any]]:
        return [{"path": "/tmp/record.pt"}]

    def set_weight_version(self, version: str) -> None:
        """Do nothing: the plan of a test stays as it is."""

    async def reset_cache(self) -> None:
        self.num_flushes += 1

    async def attach_storage(self, attachment: Attachment) -> None:
        raise InvalidRequest(NO_TIER)

    async def detach_storage(self) -> None:
        raise InvalidRequest(NO_TIER)

    async def clear_storage(self) -> None:
        raise InvalidRequest(NO_TIER)

    def flush_cache(self) -> bool:
        if self._requests:
            return False
        self.num_flushes += 1
        return True

    def status(self) -> FakeStatus:
        return FakeStatus(state=self.state, num_running=self.num_open)

    # --- called by tests ---

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def step(self) -> None:
        """Add one token to every choice."""
        if self.failure is not None:
            self._requests.fail_all(self.failure)
            return
        self._emit([run.step(self.facts, self.num_cached) for run in self._runs.values()])

    # --- methods of a SchedulerHandle ---

    def abort(self, live: LiveRequest) -> None:
        runs = [run for (owner, _), run in self._runs.items() if owner == live.request.id]
        if live.output.finished:  # the request has failed
            for run in runs:
                self._drop(run.request.id, run.index)
            return
        self.aborted.append(live.request.id)
        self._emit([run.delta([], live.aborting, self.num_cached) for run in runs])

    def end_choice(self, live: LiveRequest, index: int) -> None:
        self._drop(live.request.id, index)

    # --- internal ---

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return [7, 8, 9]
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _step_soon(self) -> None:
        if not self.held and not self._stepping and self._runs:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step_and_go_on)

    def _step_and_go_on(self) -> None:
        self._stepping = False
        self.step()
        self._step_soon()

    def _emit(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self._drop(delta.request_id, delta.index)
        self._detokenizer.process(deltas)

    def _drop(self, request_id: int, index: int) -> None:
        self._runs.pop((request_id, index), None)


class _Run:
    """One running choice."""

    def __init__(self, request: Request, index: int, prompt: list[int], ids: list[int]) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.ids = ids
        self.position = 0

    def step(self, facts: ModelFacts, num_cached: int) -> Delta:
        limit = self.request.sampling.max_new_tokens
        if limit == 0:
            return self.delta([], Finish("length", length=0), num_cached)
        token_id = self.ids[self.position]
        self.position += 1
        if token_id in self.request.sampling.stop_token_ids:
            finish = Finish("stop", matched=token_id)
        elif self.position == limit:
            finish = Finish("length", length=limit)
        elif self.position == len(self.ids):
            return self.delta([token_id, min(facts.eos_ids or {0})], self._end(facts), num_cached)
        else:
            finish = None
        return self.delta([token_id], finish, num_cached)

    def _end(self, facts: ModelFacts) -> Finish:
        self.position += 1
        return Finish("stop", matched=min(facts.eos_ids or {0}))

    def delta(self, ids: list[int], finish: Finish | None, num_cached: int) -> Delta:
        wanted = self.request.logprobs
        first = self.position - len(ids)
        usage = Usage(len(self.prompt), self.position, num_cached)
        if wanted is None:
            return Delta(self.request.id, self.index, ids, finish, usage)
        logprobs = logprobs_of(ids, wanted, first=first)
        prompt_logprobs = None
        if wanted.start >= 0 and first == 0:
            prompt_logprobs = logprobs_of(self.prompt[wanted.start :], wanted, first=0)
            if wanted.start == 0:
                prompt_logprobs.chosen[0] = (None, self.prompt[0])
                if prompt_logprobs.top:
                    prompt_logprobs.top[0] = None
        return Delta(self.request.id, self.index, ids, finish, usage, logprobs, prompt_logprobs)


def logprobs_of(ids: list[int], wanted: LogprobParams, *, first: int) -> Logprobs:
    """Return invented logprobs. The alternatives of a token are the token itself and the ids from 100 on."""
    values = [-0.25 * (first + position + 1) for position in range(len(ids))]
    chosen: list[tuple[float | None, int]] = list(zip(values, ids))
    top: list[list[tuple[float, int]] | None] = []
    requested: list[list[tuple[float, int]] | None] = []
    for value, token_id in zip(values, ids):
        if wanted.top:
            others = [(value - rank, 100 + rank) for rank in range(1, wanted.top)]
            top.append([(value, token_id), *others])
        if wanted.token_ids:
            requested.append([(value - 1, token_id) for token_id in wanted.token_ids])
    return Logprobs(chosen, top, requested)


class BrokenCore(FakeCore):
    """A core that fails with an unexpected exception."""

    def submit(self, request: Request) -> OutputStream:
        raise RuntimeError("a secret of the house")


def broken_step() -> EngineFailure:
    return EngineFailure("A step failed.")
