"""Real steps of a tiny model on any device, executed one call at a time, without threads."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fake_runner
import paged_forward
import tiny_checkpoints
from ops.activation.native import gate
from ops.attention import AttentionMetadata, AttentionOptions, native
from ops.attention.hybrid import hybrid
from ops.moe import Mixture
from ops.sampling import NO_LIMIT, Masks, SamplingArrays
from ops.sampling import native as sampling
from ops.select import Kernels, select
from runtime.batch import Batch, Sampling, StepOutput
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.resolve.graph_sizes import Buckets
from runtime.errors import OutOfMemory
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.windowed import WindowedPages
from runtime.layers.batch_reads import batch_reads
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.modeling.decoder import Decoder, collect_specs
from runtime.modeling.draft_head import DraftHead
from runtime.sequence import Sequence
from runtime.worker.cuda_graph import NOTHING_MORE, Choice, CudaGraphRunner
from runtime.worker.device import CpuDevice, Device, Read
from runtime.worker.device_drafter import DeviceDrafter
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.model_runner import StepExecutor, _capture_next
from runtime.worker.prompt_graphs import PromptGraphs
from runtime.worker.sampler import Sampler
from runtime.worker.step_inputs import Forward
from runtime.worker.worker import _states_of
from scripted_drafts import script_drafts

PAGE_SIZE = 4
KV_DTYPE = torch.float32  # of the target's pages
VOCAB_SIZE = 61
CONTEXT = 64


def _attend_tokens(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, inputs: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    rows = [row for row, count in enumerate(inputs.counts_host) for _ in range(count)]
    offsets = [offset for count in inputs.counts_host for offset in range(count)]
    pages, starts = inputs.page_table.long(), inputs.starts  # [T, W], [T]
    if any(offsets):
        pages, starts = pages[rows], starts[rows] + torch.tensor(offsets)
    # [T, K, W * page, D]
    keys, values = (pool[pages].transpose(1, 2).flatten(2, 3).to(q.dtype) for pool in (k_pool, v_pool))
    queries = q.unflatten(1, (keys.shape[1], -1))  # [T, K, G, D]
    scores = queries @ keys.transpose(2, 3) * options.scale  # [T, K, G, W * page]
    if options.soft_cap is not None:
        scores = (scores / options.soft_cap).tanh() * options.soft_cap
    places, positions = torch.arange(keys.shape[2]), starts[:, None, None, None]
    unseen = places > positions
    if options.window is not None:
        window = native.Window(options.window, options.chunked)
        unseen = unseen | window.hides(places, positions)
    if options.sinks is None:
        return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).flatten(1, 2)
    sinks = options.sinks.view(1, keys.shape[1], -1, 1).expand(len(q), -1, -1, 1)
    shares = torch.cat([scores.masked_fill(unseen, -torch.inf), sinks.to(scores.dtype)], -1).softmax(-1)[..., :-1]
    return (shares @ values).flatten(1, 2)


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, inputs: AttentionMetadata, options: AttentionOptions) -> Tensor:
    """Attend without reading the starts of rows on the host, as graphs and unknown starts require."""
    if inputs.mutual_spans or options.slopes is not None:
        return _hybrid(q, k_pool, v_pool, inputs, options)
    return _attend_tokens(q, k_pool, v_pool, inputs, options)


_hybrid = hybrid(_attend_tokens, native.attend)


def choose(
    logits: Tensor,
    arrays: SamplingArrays,
    host: SamplingArrays | None = None,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose tokens without reading the rows on the host, as graphs require."""
    if masks is not None:
        shifts = torch.arange(32, dtype=torch.int32)
        allowed = (masks.bitmask.unsqueeze(2) >> shifts & 1).flatten(1)[:, : logits.shape[1]]
        masked = torch.where(allowed == 0, -torch.inf, logits[masks.rows])
        logits = logits.index_copy(0, masks.rows, masked)
    peak, likeliest = logits.max(-1)
    drawn, _ = sampling._draw_ranked(logits, peak, arrays, logits.shape[1])
    return torch.where(arrays.greedy, likeliest, drawn), peak.isfinite()


# Sampling methods of the sequences in `outputs`, used in turn.
MAX_DRAFTS = 4
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
)


@cache
def facts(family: str = "qwen3", **config: Any) -> ModelFacts:
    layers = {} if family in WHOLE_SHAPE else {"num_hidden_layers": 2}
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, **layers, **config}
    path = tiny_checkpoints.cached(family, **config)
    return read_facts(path, {})


WHOLE_SHAPE = (  # families with several kinds of layers
    *("cohere2", "exaone4", "gemma3", "gemma3_seeing", "gpt_oss", "granitemoehybrid", "lfm2", "lfm2_moe"),
    *("llama4", "llama4_seeing", "ministral"),
    *("nemotron_nas", "olmo3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_seeing", "qwen3_5_seeing", "qwen3_next"),
)
STATES = 28  # state slots of a pool for recurrent layers


def mix(
    x: Tensor, mixture: Mixture, weights: Tensor, experts: Tensor, activation: str, *, weigh_inputs: bool = False
) -> Tensor:
    """Compute all experts for all tokens, without reading on the host which ones are needed, as graphs require."""
    gate_up, down, gate_up_bias, down_bias = mixture
    here = experts >= 0  # other ranks compute the remaining pairs
    shares = torch.zeros(len(x), len(down)).scatter_add(1, experts.clamp_min(0).long(), weights * here)  # [T, X]
    used = torch.zeros(len(x), len(down)).scatter_add(1, experts.clamp_min(0).long(), here.float())
    inputs = x.unsqueeze(1) * (shares if weigh_inputs else torch.ones_like(shares)).unsqueeze(2)  # [T, X, E]
    inner = torch.einsum("txe,xoe->txo", inputs.to(x.dtype), gate_up)
    inner = gate(inner if gate_up_bias is None else inner + gate_up_bias, activation)
    outputs = torch.einsum("txf,xef->txe", inner, down)
    outputs = outputs if down_bias is None else outputs + down_bias
    return (outputs * (used if weigh_inputs else shares).unsqueeze(2)).sum(1).to(x.dtype)


def kernels() -> Kernels:
    return replace(select(), attend=attend, mix=mix)


def model_plan(family: str = "qwen3") -> ModelPlan:
    return paged_forward.plan_for(facts(family).path, context_length=CONTEXT)


def model(family: str = "qwen3") -> Decoder:
    """Return the model of this family that all steps use. Replacing one of its methods also changes the steps."""
    return _model(family)


@cache  # not `model`: it would keep one model for `model()` and another one for `model("qwen3")`
def _model(family: str) -> Decoder:
    return load_model(facts(family), model_plan(family), kernels())


@cache
def other_model() -> Decoder:
    """Return a model that mostly disagrees with `model()`."""
    path = tiny_checkpoints.cached(
        "qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, num_hidden_layers=1, seed=9
    )
    return load_model(read_facts(path, {}), paged_forward.plan_for(path, context_length=CONTEXT), kernels())


@cache
def near_model() -> Decoder:
    """Return a copy of `model()` with noise, whose likeliest token is often another one than `model()`'s."""
    found = load_model(facts(), model_plan(), kernels())
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in found.parameters():
            weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=noise))
    return found


@cache
def head_facts_and_plan() -> tuple[ModelFacts, ModelPlan]:
    """Return the facts and the plan of a random EAGLE head for `model()`."""
    target = facts()
    config = json.loads(Path(target.path, "config.json").read_text())
    folder = Path(tempfile.mkdtemp())
    own = {
        "architectures": ["LlamaForCausalLMEagle"],
        "num_hidden_layers": 1,
        "layer_types": None,
        "model_type": "llama",
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    overrides = {"target_num_layers": 2, "shares_lm_head": True}
    plan = replace(paged_forward.plan_for(str(folder), context_length=CONTEXT), load_format="dummy")
    return read_facts(str(folder), overrides, model_impl="native"), plan


@cache
def head() -> DraftHead:
    """Return a random EAGLE head for `model()`."""
    found = load_model(*head_facts_and_plan(), kernels())
    assert isinstance(found, DraftHead)
    found.share(model())
    return found


def choice(family: str = "qwen3") -> Choice:
    """The sampling step for graphs that also choose tokens."""
    return Choice(model(family).logits, choose, greedy_only=False, limits=frozenset(NO_LIMIT))


class Steps:
    """A runner for `fake_runner.Drive`: launches are enqueued, and results are read on request."""

    def __init__(
        self,
        num_pages: int,
        num_sequences: int,
        device: Device | None = None,
        *,
        num_host_pages: int = 0,
        num_windowed: int = 0,
        family: str = "qwen3",
    ) -> None:
        """Create the runner. With `num_windowed`, sliding-window layers have this number of pages of their own."""
        self.device, self.family = device or CpuDevice(), family
        specs = collect_specs(model(family))
        kinds = {"state": 1 + STATES} if any(spec.kind == "state" for spec in specs.values()) else {}
        self.window = None
        if num_windowed:
            self.window = WindowedPages(
                {index: spec for index, spec in specs.items() if spec.kind == "windowed"}, num_windowed, 1, PAGE_SIZE
            ).window
            kinds["windowed"] = num_windowed
        self.pool = KVPool(
            specs,
            num_pages,
            PAGE_SIZE,
            KV_DTYPE,
            "cpu",
            kinds=kinds,
            num_host_pages=num_host_pages,
        )
        self.forward: Forward = model(family)
        self.vocab_size = VOCAB_SIZE
        self._num_sequences, self._num_host_pages = num_sequences, num_host_pages
        self.drafter: DeviceDrafter | None = None
        self.host_drafter: HostDrafter | None = None
        self.takes_branches = False
        self._batches: deque[Batch] = deque()
        self._reads: deque[Read[StepOutput] | OutOfMemory] = deque()
        self.executor = self._make_executor()

    def use_graphs(self, buckets: Buckets, prompt_sizes: tuple[int, ...] = (), **options: Any) -> CudaGraphRunner:
        """Compute steps with graphs of the current forward from now on. Some of the graphs also sample.

        With `prompt_sizes`, steps with prompts have graphs too.
        """
        options = {"max_pages": CONTEXT // PAGE_SIZE, "choice": choice(self.family)} | options
        options.setdefault("takes_branches", self.takes_branches)
        options.setdefault("takes_drafts", self.drafter is not None)
        if self.drafter is not None and self.drafter.reads_states:
            options["states"] = _states_of(model(self.family))
        if prompt_sizes:
            more = {"reads": options.get("reads", NOTHING_MORE), "states": options.get("states")}
            options["prompts"] = PromptGraphs(self.forward, self.pool, self.device, Buckets(prompt_sizes), **more)
        graphs = CudaGraphRunner(self.forward, self.pool, self.device, buckets, **options)
        self.use_forward(graphs)
        return graphs

    def use_draft_model(
        self, draft: Decoder, sizes: tuple[int, ...] = (), prompt_sizes: tuple[int, ...] = (), topk: int = 1
    ) -> None:
        """Let this model propose tokens, on a late device with graphs of these sizes. Call it before `use_graphs`."""
        if isinstance(draft, DraftHead):
            target = model(self.family)
            target._taps, target.tapped = None, ()  # those of another head
            if draft.taps:
                target.tap(draft.taps, kernels().join)
        pool = KVPool(
            collect_specs(draft),
            self.pool.num_pages,
            PAGE_SIZE,
            torch.float32,
            "cpu",
            num_host_pages=self._num_host_pages,
        )
        forward: Forward = draft
        reads, states = batch_reads(draft), _states_of(draft) if isinstance(draft, DraftHead) else None
        if sizes:
            prompts = PromptGraphs(draft, pool, self.device, Buckets(prompt_sizes), reads=reads, states=states)
            forward = CudaGraphRunner(
                draft,
                pool,
                self.device,
                Buckets(sizes),
                max_pages=CONTEXT // PAGE_SIZE,
                reads=reads,
                prompts=prompts if prompt_sizes else None,
                states=states,
            )
        sampler = Sampler(VOCAB_SIZE, self._num_sequences, self.device, choose=choose)
        if self.device.is_host:
            self.host_drafter = HostDrafter(
                draft, pool, self.device, sampler, self._num_sequences, MAX_DRAFTS, topk=topk
            )
        else:
            self.drafter = DeviceDrafter(
                draft, pool, self.device, sampler, self._num_sequences, MAX_DRAFTS, forward, topk
            )
        self.executor = self._make_executor()

    def use_window(self, window: int) -> None:
        """Do nothing, because the model's own layers have the window."""

    def use_forward(self, forward: Forward) -> None:
        """Use this forward from now on. Call it before the first step."""
        self.forward = forward
        self.executor = self._make_executor()

    @property
    def num_in_flight(self) -> int:
        return len(self._batches)

    def launch(self, batch: Batch) -> None:
        """Enqueue the batch. If there is too little memory, the error appears when the result is requested."""
        self._batches.append(batch)
        try:
            self._reads.append(self.executor.run(batch))
        except OutOfMemory as error:
            self._reads.append(error)

    def finish_oldest(self) -> tuple[Batch, StepOutput]:
        """Return the oldest batch in flight and its output. If its launch raised, raise again and keep the batch."""
        read = self._reads[0]
        if isinstance(read, OutOfMemory):
            raise read
        self._reads.popleft()
        return self._batches.popleft(), read()

    def drop(self) -> list[Batch]:
        """Drop all steps in flight after a failed step."""
        batches = list(self._batches)
        for read in self._reads:
            if not isinstance(read, OutOfMemory):
                read()
        self._batches.clear()
        self._reads.clear()
        return batches

    def _make_executor(self) -> StepExecutor:
        return StepExecutor(
            model(self.family),
            self.pool,
            self.forward,
            num_sequences=self._num_sequences,
            device=self.device,
            sampler=Sampler(VOCAB_SIZE, self._num_sequences, self.device, choose=choose),
            cuda_graphs=self.forward if isinstance(self.forward, CudaGraphRunner) else None,
            draft_model=self.host_drafter,
            device_drafter=self.drafter,
        )


def sequences_of(prompts: list[tuple[list[int], int]], ways: tuple[dict[str, Any], ...] = WAYS) -> list[Sequence]:
    """Return one sequence for each (prompt, number of new tokens), with all `ways` of sampling in turn."""
    return [
        fake_runner.make_sequence(prompt, max_new_tokens=new, seed=place, **ways[place % len(ways)])
        for place, (prompt, new) in enumerate(prompts)
    ]


def drive_of(steps: Steps, plan: Any, **options: Any) -> fake_runner.Drive:
    """Return a drive whose runner is `steps`, with the sizes of this module."""
    return fake_runner.Drive(
        plan,
        page_size=PAGE_SIZE,
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT,
        runner=steps,
        num_states=STATES if "state" in steps.pool.kinds else 0,
        **options,
    )


def outputs(
    prompts: list[tuple[list[int], int]],
    *,
    device: Device | None = None,
    depth: int = 1,
    num_pages: int = 24,
    sizes: tuple[int, ...] = (),
    prompt_sizes: tuple[int, ...] = (),
    capture_every: int = 3,
    num_host_pages: int = 0,
    swap: bool = False,
    drafts: list[list[int]] | None = None,
    watch: Callable[[Batch], None] | None = None,
    change: Callable[[Steps], None] | None = None,
    ways: tuple[dict[str, Any], ...] = WAYS,
    family: str = "qwen3",
    draft_model: Decoder | None = None,
    draft_methods: str = "lookup",
    topk: int = 1,
    num_windowed: int = 0,
) -> list[list[int]]:
    """Return the tokens for each (prompt, number of new tokens), with all `ways` of sampling, four at a time in a
    small pool.

    With `sizes`, graphs of these sizes are captured, one after every `capture_every` steps. `prompt_sizes` adds graphs
    of steps with prompts. `change` modifies the steps before the first one. With `swap` the scheduler uses host pages
    for retracted sequences and admits as many sequences as possible. `drafts` are the outputs without drafts; rows then
    propose correct and wrong ids in turn. If a step lacks memory, its newest sequence is retracted and keeps its
    tokens. `draft_model` proposes tokens on the device if `draft_methods` is "model" or "both", with
    alternatives among its `topk` likeliest tokens.
    """
    steps = Steps(num_pages, 4, device, num_host_pages=num_host_pages, num_windowed=num_windowed, family=family)
    steps.takes_branches = topk > 1
    if draft_model is not None:
        steps.use_draft_model(draft_model, sizes, prompt_sizes, topk)
    graphs = steps.use_graphs(Buckets(sizes), prompt_sizes) if sizes else None
    if change is not None:
        change(steps)
    ratios = {"new_token_ratio": 0.0, "min_new_token_ratio": 0.0} if swap else {}
    plan = fake_runner.make_plan(
        max_running=4,
        max_drafts=0 if drafts is None and draft_model is None else MAX_DRAFTS,
        draft_methods=draft_methods,
        overlap_drafts=True,
        draft_topk=topk,
        max_tree_drafts=MAX_DRAFTS * topk,
        **ratios,
    )
    drive = drive_of(
        steps,
        plan,
        num_pages=num_pages,
        depth=depth,
        watch=watch,
        num_host_pages=num_host_pages if swap else 0,
        window=steps.window,
        num_windowed=num_windowed,
    )
    sequences = sequences_of(prompts, ways)
    drive.add(*sequences)
    if drafts is not None:
        known = dict(zip(sequences, drafts, strict=True))
        script_drafts(drive.scheduler, known.__getitem__, VOCAB_SIZE, MAX_DRAFTS)
    for number in itertools.count(1):
        idle = not steps.num_in_flight
        try:
            batch = drive.step()
        except OutOfMemory:
            drive.scheduler.give_up_newest(steps.drop())
            continue
        if batch is None and idle:
            return [drive.output(sequence) for sequence in sequences]
        if graphs is not None and number % capture_every == 0:
            _capture_next(steps.executor.graph_runners)
    raise AssertionError


def batch(num_rows: int, *, start: int = 5, count: int = 1) -> Batch:
    """Return a batch of `num_rows` rows of `count` tokens each. Each row has its own pages, and samples."""
    width = -(-(start + count) // PAGE_SIZE)
    return Batch(
        number=0,
        sequences=(None,) * num_rows,  # type: ignore[arg-type]
        starts=np.full(num_rows, start, np.int32),
        counts=np.full(num_rows, count, np.int32),
        sequence_indices=np.arange(num_rows, dtype=np.int32),
        token_ids=np.arange(3, 3 + num_rows * count, dtype=np.int32),
        page_table=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
        sampling=Sampling(
            positions=np.arange(1, num_rows + 1, dtype=np.int32) * count - 1,
            row_of=np.arange(num_rows, dtype=np.int32),
            greedy=np.ones(num_rows, np.bool_),
            uniform=np.zeros(num_rows, np.float32),
        ),
    )


def replays(monkeypatch: pytest.MonkeyPatch, made: Steps) -> Callable[[Batch], bool]:
    """Return a function that computes a batch and returns whether only graphs computed it, without the model."""
    eager = made.forward._eager  # pyright: ignore[reportAttributeAccessIssue]
    calls: list[int] = []

    def counted(batch: Any) -> torch.Tensor:
        calls.append(batch.num_tokens)
        return eager(batch)

    monkeypatch.setattr(made.forward, "_eager", counted)

    def run(one: Batch) -> bool:
        calls.clear()
        made.launch(one)
        made.finish_oldest()
        return not calls

    return run
