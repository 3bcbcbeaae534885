"""Experts on several ranks: every logit equals that of one rank, wherever the experts are, also after they moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cpp_kernels
import paged_forward
import tiny_checkpoints
from ops.select import select
from rank_cases import MIXTURES
from ranks_on_gloo import on_ranks
from runtime.experts.placement import Placement, in_order
from runtime.layers import expert_sharing
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.moe import mixtures
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder
from runtime.worker import expert_moves
from runtime.worker.expert_moves import move_experts

SOON = ("deepseek_v3", "gpt_oss", "qwen3_moe")  # families in the default test run
each_family = pytest.mark.parametrize(
    "family", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
TOLERANCE = 1e-5
SIZES = [(2, 2), (4, 4), (4, 2)]  # ranks, and parts among which the experts are divided


def path_of(family: str) -> str:
    groups = {"n_group": 4} if MIXTURES[family] == "n_routed_experts" else {}
    return tiny_checkpoints.cached(family, **{MIXTURES[family]: 8}, **groups)


@cache
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (25, 11)]


@cache
def expected(family: str) -> list[Tensor]:
    with torch.inference_mode():
        return paged_forward.all_logits(paged_forward.load(path_of(family)), sequences(), 4)


def load(mesh: Mesh, family: str, kernels: Any = None, **sharing: Any) -> tuple[Decoder, ExpertSharing]:
    facts = read_facts(path_of(family), None)
    plan = paged_forward.plan_for(facts.path)
    shared = ExpertSharing(mesh.axis("ep"), **sharing)
    return load_model(facts, plan, kernels or select(), mesh.axis("tp"), None, mesh.rank_info, shared), shared


def error(mesh: Mesh, model: Decoder, family: str) -> float:
    """Return the largest difference of a logit on rank 0, which alone has logits; 0.0 on other ranks."""
    found = paged_forward.all_logits(model, sequences(), 4)
    if mesh.rank_info.rank:
        return 0.0
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected(family), strict=True))


def largest_error(
    folder: Path,
    family: str,
    size: int,
    parts: int,
    change: Callable[[Mesh, Decoder, ExpertSharing], None] | None = None,
    **sharing: Any,
) -> float:
    """Return the largest difference of a logit of any rank. `change` is called after a first forward."""

    expected(family)

    def work(mesh: Mesh) -> float:
        with torch.inference_mode():
            model, shared = load(mesh, family, **sharing)
            worst = error(mesh, model, family)
            if change is not None:
                change(mesh, model, shared)
                worst = error(mesh, model, family)
            return worst

    infos = [RankInfo(rank=rank, tp_size=size, ep_size=parts) for rank in range(size)]
    return max(on_ranks(folder, infos, work))


def drawn(layer: int, placement: Placement, seed: int = 0) -> tuple[int, ...]:
    """Return a random placement with as many slots."""
    rng = random.Random(layer * 100 + seed)
    count, slots = placement.num_experts, len(placement.experts)
    experts = [*range(count), *(rng.randrange(count) for _ in range(slots - count))]
    rng.shuffle(experts)
    return tuple(experts)


def shuffle(mesh: Mesh, model: Decoder, shared: ExpertSharing) -> None:
    """Move the experts of all layers twice."""
    moved = 0
    for seed in range(2):
        for layer, mixture in mixtures(model).items():
            before = shared.placement(layer, mixture.num_experts)
            moved += move_experts(mixture, layer, shared, drawn(layer, before, seed))
            assert shared.placement(layer, mixture.num_experts) != before
    assert moved


@pytest.mark.parametrize(("size", "parts"), SIZES)
@each_family
def test_experts_on_several_ranks_give_every_logit(family: str, size: int, parts: int, tmp_path: Path) -> None:
    assert largest_error(tmp_path, family, size, parts) < TOLERANCE


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@each_family
def test_moved_experts_and_copies_give_every_logit(family: str, dispatch: str, tmp_path: Path) -> None:
    assert largest_error(tmp_path, family, 4, 2, shuffle, num_redundant=4, dispatch=dispatch) < TOLERANCE


@pytest.mark.parametrize("num_redundant", [0, 4])
@each_family
def test_all_to_all_gives_every_logit(
    family: str, num_redundant: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_sharing, "EXCHANGE_TOKENS", 1)
    assert largest_error(tmp_path, family, 2, 2, shuffle, num_redundant=num_redundant, exchanges=True) < TOLERANCE


def test_an_initial_placement_is_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    with torch.inference_mode():
        plain = mixtures(paged_forward.load(path_of("qwen3_moe")))
    first = {layer: drawn(layer, in_order(mixture.num_experts, 2, 2)) for layer, mixture in plain.items()}
    assert largest_error(tmp_path, "qwen3_moe", 2, 2, num_redundant=2, first=first) < TOLERANCE


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_packed_experts_move_too(family: str, tmp_path: Path) -> None:
    cpp_kernels.library()

    expected(family)

    def work(mesh: Mesh) -> float:
        with torch.inference_mode():
            model, shared = load(mesh, family, select(cpp_kernels.CHOICES), num_redundant=2)
            shuffle(mesh, model, shared)
            return error(mesh, model, family)

    infos = [RankInfo(rank=rank, tp_size=2, ep_size=2) for rank in range(2)]
    assert max(on_ranks(tmp_path, infos, work)) < TOLERANCE


# --- faults that the tests above must notice ---


def forget_the_map(mesh: Mesh, model: Decoder, shared: ExpertSharing) -> None:
    """Move the weights, and leave the tables as they were."""
    for layer, mixture in mixtures(model).items():
        before = shared.placement(layer, mixture.num_experts)
        move_experts(mixture, layer, shared, drawn(layer, before))
        shared.place(layer, before)


def keep_stale_weights(mesh: Mesh, model: Decoder, shared: ExpertSharing) -> None:
    """Change the tables, and leave the weights as they were."""
    for layer, mixture in mixtures(model).items():
        before = shared.placement(layer, mixture.num_experts)
        shared.place(layer, Placement(drawn(layer, before), before.num_experts, before.num_ranks))


def lose_a_token(mesh: Mesh, model: Decoder, shared: ExpertSharing) -> None:
    """Let one rank skip the first token of each step."""
    here = shared.here

    def without_first(layer: int, chosen: Tensor, num_experts: int) -> Tensor:
        found = here(layer, chosen, num_experts).clone()
        found[0] = -1
        return found

    if mesh.rank_info.rank == 0:
        shared.here = without_first  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [forget_the_map, keep_stale_weights, lose_a_token])
def test_faults_are_noticed(fault: Any, tmp_path: Path) -> None:
    assert largest_error(tmp_path, "qwen3_moe", 2, 2, fault) > 100 * TOLERANCE


@contextmanager
def swapped_lines() -> Iterator[None]:
    """Deliver received experts in the reverse order."""
    exchange = expert_moves._exchange
    expert_moves._exchange = lambda *args: exchange(*args).flip(0)
    try:
        yield
    finally:
        expert_moves._exchange = exchange


def test_experts_in_the_wrong_slots_are_noticed(tmp_path: Path) -> None:
    with swapped_lines():
        assert largest_error(tmp_path, "qwen3_moe", 2, 2, shuffle) > 100 * TOLERANCE
