"""Layers in host memory, on a device that executes copies and steps late."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import late_steps
import tiny_checkpoints
from fake_device import LateDevice
from ops.matmul import with_triton
from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading import offload
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.loading.weight_memory import distinct
from runtime.modeling.decoder import Decoder
from runtime.modeling.host_layers import HostLayer
from runtime.worker.device import CpuDevice, Mark, Stream
from runtime.worker.layer_ring import LayerRing

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + i % 4) for i in range(5)]


class Always(Random):
    """Lets the copy stream (place 0) or the forward stream (place -1) proceed whenever it can."""

    def __init__(self, place: int) -> None:
        super().__init__(0)
        self._place = place

    def choice(self, seq: Any) -> Any:
        return seq[self._place]


ORDERS = {"random": lambda: Random(1), "copies first": lambda: Always(0), "copies last": lambda: Always(-1)}


@cache
def facts() -> ModelFacts:
    sizes = {"vocab_size": late_steps.VOCAB_SIZE, "max_position_embeddings": late_steps.CONTEXT}
    return read_facts(tiny_checkpoints.cached("qwen3", num_hidden_layers=8, **sizes), {})


def load(model_facts: ModelFacts, **options: int) -> Decoder:
    plan = late_steps.paged_forward.plan_for(model_facts.path, context_length=late_steps.CONTEXT)
    return load_model(model_facts, replace(plan, **options), late_steps.kernels())


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of the model whose layers are all on the device."""
    model = load(facts())
    monkeypatch.setattr(late_steps, "_model", lambda family: model)
    return late_steps.outputs(PROMPTS)


@pytest.fixture
def ring(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> LayerRing:
    """The ring of the model in which `outputs` computes from now on."""
    model = load(facts(), offload_group=4, offload_in_group=3)
    made = LayerRing(model, model.in_host, 2)
    monkeypatch.setattr(late_steps, "_model", lambda family: model)
    return made


def outputs(ring: LayerRing, order: str, sizes: tuple[int, ...] = ()) -> list[list[int]]:
    device = LateDevice(ORDERS[order]())
    for slot in ring.slots:
        device.adopt(slot)
        slot.zero_()
    ring.use(device)
    return late_steps.outputs(PROMPTS, device=device, sizes=sizes)


@pytest.mark.parametrize("sizes", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_tokens_are_those_of_a_model_on_the_device(
    sizes: tuple[int, ...], ring: LayerRing, plain: list[list[int]]
) -> None:
    assert {order: outputs(ring, order, sizes) for order in ORDERS} == dict.fromkeys(ORDERS, plain)


def test_a_layer_that_does_not_wait_for_its_copy_is_noticed(
    ring: LayerRing, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerRing, "_wait", lambda *_: None)
    assert outputs(ring, "copies last") != plain


def test_a_copy_that_does_not_wait_for_the_layer_before_it_is_noticed(
    ring: LayerRing, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for = LateDevice.wait_for

    def hasty(self: LateDevice, mark: Mark, then: Stream) -> None:
        if then != "copy":
            wait_for(self, mark, then)

    monkeypatch.setattr(LateDevice, "wait_for", hasty)
    assert outputs(ring, "copies first") != plain


def test_a_graph_that_does_not_wait_for_its_copies_cannot_be_captured(
    ring: LayerRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerRing, "_wait", lambda *_: None)
    device = LateDevice(Random(0))
    for slot in ring.slots:
        device.adopt(slot)
    ring.use(device)
    steps = late_steps.Steps(12, 4, device)
    graphs = steps.use_graphs(late_steps.Buckets((2,)))
    with pytest.raises(AssertionError, match="does not wait for the last captured copy"):
        graphs.capture_next()


def test_the_device_holds_only_the_slots_of_layers_in_host_memory(ring: LayerRing) -> None:
    model = late_steps.model()
    all_bytes = sum(each.untyped_storage().nbytes() for each in distinct(load(facts()).parameters()))
    in_host = sum(layer.num_bytes for layer in model.in_host)
    on_device = sum(each.untyped_storage().nbytes() for each in distinct(model.parameters()))
    assert [model.layers[index] for index in (1, 2, 3, 5, 6, 7)] == [layer.layer for layer in model.in_host]
    assert ring.num_bytes == 2 * in_host // 6
    assert all_bytes - in_host <= on_device - ring.num_bytes <= all_bytes - in_host + 6 * 4096


@pytest.mark.parametrize(
    ("gib", "layers"), [(3, [2, 5, 7]), (5, [1, 3, 4, 6, 7]), (8, list(range(8))), (99, list(range(8)))]
)
def test_a_number_of_gigabytes_chooses_layers_at_equal_distances(
    gib: int, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "prepared_bytes", lambda layer, dtype: 1 << 30)
    model = load(facts())
    plan = replace(late_steps.model_plan(), offload_gib=gib, offload_host_bytes=9 << 30)
    chosen = offload.layers_in_host(model, plan, torch.float32)
    assert [*chosen.layers] == [model.layers[index] for index in layers]
    assert chosen.slot_bytes == 2 << 30


def test_layers_that_save_no_memory_or_do_not_fit_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "prepared_bytes", lambda layer, dtype: 1 << 30)
    model, plan = load(facts()), replace(late_steps.model_plan(), offload_host_bytes=3 << 30)
    with pytest.raises(ConfigurationError, match="--cpu-offload-gb 2 would keep 2 of 8 layers"):
        offload.layers_in_host(model, replace(plan, offload_gib=2), torch.float32)
    with pytest.raises(CheckpointError, match=r"need 4\.0 GiB, but only 3\.0 GiB are free"):
        offload.layers_in_host(model, replace(plan, offload_gib=4), torch.float32)
    monkeypatch.setattr(offload, "prepared_bytes", lambda layer, dtype: (1 << 29) + 1)  # pinned memory: 1 GiB
    with pytest.raises(CheckpointError, match=r"need 4\.0 GiB, but only 3\.0 GiB are free"):
        offload.layers_in_host(model, replace(plan, offload_group=2), torch.float32)


def test_a_weight_that_is_read_in_another_place_is_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.half = layer.weight.data[:2]  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="weight of Linear is also read in another place"):
        HostLayer(layer, frozenset())


def test_all_parts_of_a_packed_weight_move() -> None:
    """Weights that Triton's kernels read as several parts: codes and scales."""
    layer, slot = nn.Module(), torch.full((8192,), 7, dtype=torch.uint8)
    layer.weight = nn.Parameter(with_triton.prepare(torch.randn(32, 64), bits=8), requires_grad=False)
    codes, scales = [part.clone() for part in parts_of(layer)]
    host = HostLayer(layer, frozenset())
    host.bind(slot)
    slot[: host.num_bytes].copy_(host.memory)
    assert torch.equal(parts_of(layer)[0], codes)
    assert torch.equal(parts_of(layer)[1], scales)
    assert {each.untyped_storage().data_ptr() for each in (layer.weight, *parts_of(layer))} == {slot.data_ptr()}


def parts_of(layer: Any) -> list[torch.Tensor]:
    return [layer.weight.parts.codes, layer.weight.parts.scales]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "deepseek_v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3_next", "lfm2_moe", "qwen2")),
    ],
)
def test_other_families_compute_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = late_steps.outputs(PROMPTS[:3], family=family)
    model = load(late_steps.facts(family), offload_group=1, offload_ahead=0)
    LayerRing(model, model.in_host, 1).use(CpuDevice())
    monkeypatch.setattr(late_steps, "_model", lambda family: model)
    assert late_steps.outputs(PROMPTS[:3], family=family) == expected
