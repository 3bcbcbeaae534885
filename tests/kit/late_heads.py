"""Draft heads beside the tiny models of `late_steps`, and the ids that drafters on a GPU and on a CPU propose."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seqs
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fake_runner
import late_steps
import paged_forward
from late_steps import CONTEXT, MAX_DRAFTS, VOCAB_SIZE, Steps
from runtime.batch import Batch
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.draft_facts import _OF_MODEL
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.modeling.draft_head import DraftHead
from runtime.models.draft_heads import NEXTN, OWN_PREFIXES
from runtime.request import Finish
from runtime.sequence import Sequence
from runtime.worker.cuda_graph import _Kind
from runtime.worker.device_drafter import DeviceDrafter, with_token_ids
from runtime.worker.draft_entries import drafted_by_model
from runtime.worker.host_drafter import HostDrafter, _flat
from runtime.worker.step_inputs import StepInputs

ROWS = 4  # maximum number of running sequences
SMALL_VOCABULARY = 40  # number of tokens that the EAGLE-3 heads can propose
WRONG_OF_8 = 2  # number of draft tokens of 8 that `corrected` leaves as they are


@cache
def facts_and_plan(kind: str, family: str = "qwen3") -> tuple[ModelFacts, ModelPlan]:
    """Return the facts and the plan of a head with dummy weights (see `head`)."""
    target = late_steps.facts(family)
    config = json.loads(Path(target.path, "config.json").read_text(encoding="utf-8"))
    own: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": None}
    if kind in ("EAGLE", "EAGLE3"):
        own |= {"architectures": ["LlamaForCausalLMEagle3" if kind == "EAGLE3" else "LlamaForCausalLMEagle"]}
        own |= {"model_type": "llama", "target_num_layers": target.num_layers, "shares_lm_head": kind == "EAGLE"}
        own |= {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
        own |= {"draft_vocab_size": SMALL_VOCABULARY} if kind == "EAGLE3" else {}
    else:
        name = "MiMoForCausalLMMTP" if kind == "MIMO" else NEXTN[config["architectures"][0]]
        own |= {**_OF_MODEL, "architectures": [name], "nextn_layer": None if name in OWN_PREFIXES else 2}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({**config, **own}), encoding="utf-8")
    plan = replace(paged_forward.plan_for(str(folder), context_length=CONTEXT), load_format="dummy")
    return read_facts(str(folder), own, model_impl="native"), plan


@cache
def head(kind: str, family: str = "qwen3") -> DraftHead:
    """Return a random head for `late_steps.model(family)`. `kind` is "EAGLE", "EAGLE3", "NEXTN" or "MIMO"."""
    found = load_model(*facts_and_plan(kind, family), late_steps.kernels())
    assert isinstance(found, DraftHead)
    generator = torch.Generator().manual_seed(7)
    for parameter in found.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():  # larger values than dummy weights have
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    if found.token_map is not None:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:SMALL_VOCABULARY].sort().values
        found.token_map.offsets.data.copy_(ids - torch.arange(SMALL_VOCABULARY))
        found.token_map.prepare()
    found.share(late_steps.model(family))
    return found


@dataclass(slots=True)
class Proposals:
    """The proposed ids before their correction, by (prompt, position of the token that they follow)."""

    rights: Mapping[tuple[int, ...], list[int]]  # prompt -> prompt and output ids
    seen: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)
    unread: list[Any] = field(default_factory=list)

    def note(self, batch: Batch, positions: np.ndarray, ids: np.ndarray) -> None:
        """Record the ids that a step proposes. `positions` and `ids` are those of all T tokens."""
        firsts = batch.counts.cumsum() - batch.counts
        for row, count in zip(*(each.tolist() for each in drafted_by_model(batch)), strict=True):
            first = int(firsts[row])
            prompt = _prompt(batch, row)
            self.seen[prompt, int(positions[first])] = ids[first + 1 : first + 1 + count].tolist()

    def read(self) -> None:
        """Record the ids of steps on a late device, after it has completed them."""
        for batch, positions, ids in self.unread:
            self.note(batch, positions.numpy(), ids.numpy())
        self.unread.clear()

    def right_ids(self, batch: Batch) -> Tensor:
        """Return the right token of each row at each position, int64 [B, ...], or -1."""
        width = int((batch.starts + batch.counts).max())
        table = torch.full((len(batch.counts), width), -1, dtype=torch.int64)
        for row in range(len(batch.counts)):
            ids = self.rights.get(_prompt(batch, row), [])[:width]
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return table


def _prompt(batch: Batch, row: int) -> tuple[int, ...]:
    sequence = batch.sequences[row]
    return tuple(sequence.ids[: sequence.num_prompt])


def _chances(positions: Tensor) -> Tensor:
    """Return a number from 0 to 7 for each draft, which depends on its position."""
    return (positions * 2_654_435_761 // 1024) % 8


@contextmanager
def corrected(proposals: Proposals) -> Iterator[None]:
    """Record what drafters propose, and replace most of it by the right tokens, so that runs of drafts are accepted."""
    propose, on_host = DeviceDrafter.propose, HostDrafter.propose

    def places(batch: Batch) -> tuple[Tensor, Tensor]:
        rows, counts = drafted_by_model(batch)
        firsts = (batch.counts.cumsum() - batch.counts)[rows]
        found = [first + 1 + np.arange(count) for first, count in zip(firsts, counts, strict=True)]
        empty = np.zeros(0, np.int64)
        index = np.concatenate([empty, *found]).astype(np.int64)
        return torch.from_numpy(index), torch.from_numpy(np.repeat(rows, counts).astype(np.int64))

    def right(batch: Batch, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the ids [T] with most drafts corrected. `positions` int64 [T]."""
        index, rows = places(batch)
        table = proposals.right_ids(batch)
        at = positions[index]
        known = table[rows, at]
        keep = (_chances(at) < WRONG_OF_8) | (known < 0)
        return ids.index_copy(0, index, torch.where(keep, ids[index], known))

    def on_device(self: DeviceDrafter, batch: Batch, inputs: StepInputs, lengths: Tensor) -> StepInputs:
        found = propose(self, batch, inputs, lengths)
        if not len(drafted_by_model(batch)[0]):
            return found
        ids = found.forward.token_ids
        proposals.unread.append((batch, inputs.forward.positions.clone(), ids.clone()))
        ids = right(batch, ids, inputs.forward.positions)
        self._store(batch, inputs, self._ids, ids)
        return with_token_ids(inputs, ids)

    def by_host(self: HostDrafter, batch: Batch, last_tokens: Tensor) -> Batch:
        found = on_host(self, batch, last_tokens)
        if not len(drafted_by_model(batch)[0]):
            return found
        rows, _, positions = _flat(batch)
        proposals.note(batch, positions, found.token_ids)
        ids = right(batch, torch.from_numpy(found.token_ids).long(), torch.from_numpy(positions).long())
        self._ids[batch.sequence_indices[rows], positions % self._entries.kept] = ids.numpy()
        return replace(found, token_ids=ids.numpy().astype(np.int32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceDrafter, "propose", on_device)
        patch.setattr(HostDrafter, "propose", by_host)
        yield


def capture_all(steps: Steps) -> None:
    """Capture all graphs now. Every later step must be computed by a graph."""
    for graphs in steps.executor.graph_runners:
        if graphs._choice is not None:
            graphs._request_capture(_Kind(False))
        graphs.request_all()
        while graphs.capture_next():
            pass

        def eager(batch: ForwardBatch) -> Tensor:
            raise AssertionError(f"a step of {batch.num_tokens} tokens has no graph")

        graphs._eager = eager


def run(
    steps: Steps, sequences: Seqs[Sequence], *, depth: int, num_pages: int, chunk_tokens: int | None, aborted: int = 0
) -> tuple[list[list[int]], int]:
    """Return the tokens of the sequences, and the number of steps. The first `aborted` sequences end early."""
    plan = fake_runner.make_plan(
        max_running=ROWS,
        max_drafts=MAX_DRAFTS,
        draft_methods="model",
        overlap_drafts=True,
        chunk_tokens=chunk_tokens,
        new_token_ratio=0.0,
        min_new_token_ratio=0.0,
    )
    drive = late_steps.drive_of(steps, plan, num_pages=num_pages, depth=depth)
    drive.add(*sequences)
    for number in itertools.count():
        idle = not steps.num_in_flight
        if drive.step() is None and idle:
            return [drive.output(sequence) for sequence in sequences], number
        if number % 4 == 3 and number // 4 < aborted:
            drive.deltas += drive.scheduler.abort([sequences[number // 4]], Finish("abort"))
    raise AssertionError


def sequences_of(prompts: Seqs[tuple[list[int], int]], ways: Seqs[dict[str, Any]]) -> list[Sequence]:
    """Return a sequence for each (prompt, number of new tokens). Some of them end at a token that they may choose."""
    return [
        fake_runner.make_sequence(
            prompt,
            max_new_tokens=new,
            seed=place,
            stop_ids={2 + place} if place % 3 == 2 else (),
            **ways[place % len(ways)],
        )
        for place, (prompt, new) in enumerate(prompts)
    ]


def rights(sequences: Seqs[Sequence], outputs: Seqs[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return `Proposals.rights` for sequences with these outputs."""
    return {
        tuple(each.ids[: each.num_prompt]): [*each.ids[: each.num_prompt], *output]
        for each, output in zip(sequences, outputs, strict=True)
    }
