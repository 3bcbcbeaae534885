"""New weights for a model that is loaded: as if it had been loaded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cpp_kernels
import paged_forward
import tiny_checkpoints
from ops.matmul import with_onednn
from ops.select import Kernels, select
from runtime.batch import Batch, Sampling
from runtime.errors import CheckpointError
from runtime.models.decoder import Decoder
from runtime.models.loader import update_weights
from runtime.worker.cpu_graph import CpuGraph

IDS = list(range(10, 40))
FAMILIES = ("gemma2", "phi3", "qwen2", "qwen3_moe")


def tensors_of(path: str) -> dict[str, Tensor]:
    return load_file(Path(path) / "model.safetensors")


def logits(model: Decoder) -> Tensor:
    return paged_forward.all_logits(model, [IDS], page_size=4)[0]


def kernels(way: str) -> Kernels:
    if way == "with_cpp":
        cpp_kernels.library()
        return select(cpp_kernels.CHOICES, {"with_cpp": {"num_threads": 1}})
    if way == "with_onednn" and not with_onednn.packs(torch.float32):
        pytest.skip("oneDNN packs no weights here")
    return select({"matmul": way})


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("native", {}),
    ("with_onednn", {}),
    ("with_cpp", {}),
    ("with_cpp", {"quantization": "w8a8_int8"}),
    ("with_cpp", {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("way", "options"), WAYS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_updated_model_is_the_one_that_is_loaded_anew(
    family: str, tied: bool, way: str, options: dict[str, Any]
) -> None:
    config: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": tied}
    before, after = (tiny_checkpoints.cached(family, seed=seed, **config) for seed in (0, 1))
    model = paged_forward.load(before, kernels=kernels(way), **options)
    first = logits(model)
    memory = memory_of(model)
    update_weights(model, tensors_of(after))
    wanted = logits(paged_forward.load(after, kernels=kernels(way), **options))
    assert torch.equal(logits(model), wanted)
    assert (wanted - first).abs().max() > 0.1
    assert memory_of(model) == memory


def memory_of(model: Decoder) -> dict[str, int]:
    """Where each parameter is, but for those in oneDNN's layout, which cannot be written in place."""
    return {
        name: parameter.data_ptr() for name, parameter in model.named_parameters() if not parameter.is_mkldnn
    }


def test_some_layers_may_be_updated_alone() -> None:
    before, after = (tensors_of(tiny_checkpoints.cached("llama", seed=seed)) for seed in (0, 1))
    some = {name: tensor for name, tensor in after.items() if "layers.1.mlp" in name or "norm" in name}
    model = paged_forward.load(tiny_checkpoints.cached("llama", seed=0))
    update_weights(model, some)
    found = logits(model)
    update_weights(model, before)
    assert torch.equal(logits(model), logits(paged_forward.load(tiny_checkpoints.cached("llama", seed=0))))
    assert not torch.equal(logits(model), found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"), "1 missing .*k_proj"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "not of this model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), "must be 32"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: Any, message: str) -> None:
    model = paged_forward.load(tiny_checkpoints.cached("llama", seed=0))
    wanted, tensors = logits(model), tensors_of(tiny_checkpoints.cached("llama", seed=1))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        update_weights(model, tensors)
    assert torch.equal(logits(model), wanted)


def test_scales_of_a_cache_of_8_bits_are_read_anew() -> None:
    model: Any = paged_forward.load(tiny_checkpoints.cached("llama"))
    update_weights(model, {f"model.layers.1.self_attn.{part}_scale": torch.tensor(0.5) for part in "kv"})
    assert model.layers[1].attention.kv_scales.values == {"k_scale": 0.5, "v_scale": 0.5}
    assert model.layers[0].attention.kv_scales.values == {"k_scale": 1.0, "v_scale": 1.0}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "w4a16"])
def test_a_recorded_graph_computes_with_the_new_weights(quantization: str | None, tied: bool) -> None:
    config: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": tied}
    before, after = (tiny_checkpoints.cached("gemma", seed=seed, **config) for seed in (0, 1))
    own = kernels("with_cpp")
    model = paged_forward.load(before, kernels=own, quantization=quantization)
    graph = CpuGraph(model, paged_forward.pool_for(model, 8, 16), own, 32, 1)
    first = paged_forward.graph_logits(graph, model, prompt(), torch.zeros(1, dtype=torch.int64)).clone()
    update_weights(model, tensors_of(after))
    found = paged_forward.graph_logits(graph, model, prompt(), torch.zeros(1, dtype=torch.int64))
    fresh = paged_forward.load(after, kernels=own, quantization=quantization)
    again = CpuGraph(fresh, paged_forward.pool_for(fresh, 8, 16), own, 32, 1)
    assert torch.equal(
        found, paged_forward.graph_logits(again, fresh, prompt(), torch.zeros(1, dtype=torch.int64))
    )
    assert not torch.equal(found, first)


def prompt() -> Batch:
    one = np.ones(1, np.float32)
    zero = np.zeros(1, np.int32)
    return Batch(
        number=0,
        sequences=(),
        starts=zero,
        counts=np.array([len(IDS)], np.int32),
        sequence_indices=zero,
        token_ids=np.array(IDS, np.int32),
        page_table=np.arange(2, dtype=np.int32)[None],
        sampling=Sampling(zero, greedy=one > 0, uniform=one - 1),
    )
