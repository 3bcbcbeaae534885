"""Weight updates of a loaded model, which must equal a model loaded with the new weights."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cpp_kernels
import paged_forward
import quantized_checkpoints
import tiny_checkpoints
from ops.matmul import with_onednn
from ops.select import Kernels, select
from runtime.batch import Batch, Sampling
from runtime.errors import CheckpointError, ConfigurationError, InvalidRequest
from runtime.loading import tensors
from runtime.loading.facts import read_facts
from runtime.loading.weight_update import LoadedWeights, WeightSource
from runtime.loading.whole_vocabulary import WholeVocabulary
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder
from runtime.modeling.encoder import Encoder
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
    own = kernels(way)
    model = paged_forward.load(before, kernels=own, **options)
    first = logits(model)
    memory = memory_of(model)
    assert weights_of(model, before, kernels=own, **options).load(after, None) == {"error": None}
    wanted = logits(paged_forward.load(after, kernels=kernels(way), **options))
    assert torch.equal(logits(model), wanted)
    assert (wanted - first).abs().max() > 0.1
    assert memory_of(model) == memory


def weights_of(
    model: Decoder,
    path: str,
    *,
    kernels: Kernels | None = None,
    source: WeightSource | None = None,
    scaled_cache: bool = False,
    **options: Any,
) -> LoadedWeights:
    """Return the `WeightUpdate` of a model that was loaded from `path`, and whose addresses graphs hold."""
    facts = read_facts(path)
    plan = paged_forward.plan_for(path, **{"context_length": facts.context_length, **options})
    source = source or WeightSource.of(facts, plan)
    mesh = Mesh(RankInfo(), torch.device("cpu"))
    fixed = kernels is None or kernels.backends["matmul"] != "with_onednn"
    return LoadedWeights(model, source, kernels or select(), mesh, fixed=fixed, scaled_cache=scaled_cache)


def memory_of(model: Decoder) -> dict[str, int]:
    """Return the address of each parameter, except for oneDNN's layout, which cannot be written in place."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters() if not parameter.is_mkldnn}


def test_a_model_whose_tensors_are_not_replaced_starts_with_a_copy_of_its_vocabulary() -> None:
    """A draft head beside tensor-parallel ranks has this copy. The models of GGUF files are like this one."""
    path = tiny_checkpoints.cached("qwen2")
    facts = read_facts(path)
    plan = replace(paged_forward.plan_for(path, context_length=facts.context_length), by_transformers=True)
    weights = weights_of(paged_forward.load(path), path, source=WeightSource.of(facts, plan))
    ranks = Mesh(RankInfo(), torch.device("cpu")).axis("tp")
    copy = WholeVocabulary(ranks, ranks, None)
    weights.follow(copy, gather=False)
    with pytest.raises(ConfigurationError, match="cannot read"):
        weights.follow(copy, gather=True)


@pytest.mark.parametrize("family", sorted(tiny_checkpoints.FAMILIES))
def test_layers_of_every_family_are_compared(family: str) -> None:
    """A model equals itself after a step, whatever its layers have cached."""
    path = tiny_checkpoints.cached(family)
    model = paged_forward.load(path)
    if not isinstance(model, Encoder):
        logits(model)
    weights_of(model, path).check(path, None)


def write(tmp_path: Path, changed: dict[str, Tensor], path: str) -> str:
    shutil.copytree(path, tmp_path / "new")
    save_file(changed, tmp_path / "new" / "model.safetensors")
    return str(tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"), "1 missing .*k_proj"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "not of this model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), "must be 32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(change: Any, message: str, tmp_path: Path) -> None:
    path = tiny_checkpoints.cached("llama", seed=0)
    model = paged_forward.load(path)
    wanted, changed = logits(model), tensors_of(tiny_checkpoints.cached("llama", seed=1))
    change(changed)
    weights, new = weights_of(model, path), write(tmp_path, changed, path)
    with pytest.raises(CheckpointError, match=message):
        weights.check(new, None)
    assert not weights.is_changing
    assert re.search(message, weights.load(new, None)["error"])
    assert weights.is_changing  # experts that move now would mix old and new weights
    weights.restore()
    assert not weights.is_changing
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("llama", {"rope_theta": 77.0}, "rope"),
        ("llama", {"rms_norm_eps": 0.01}, "eps is 0.01"),
        ("llama", {"num_hidden_layers": 1}, "num_layers is 1, not 3"),
        ("llama", {"tie_word_embeddings": True}, "tied is True, not False"),
        ("llama", {"intermediate_size": 64}, "layout"),
        ("qwen3", {}, "architecture is Qwen3ForCausalLM, not LlamaForCausalLM"),
    ],
)
def test_another_model_is_refused(family: str, values: dict[str, Any], message: str) -> None:
    path = tiny_checkpoints.cached("llama")
    other = tiny_checkpoints.cached(family, **values)
    with pytest.raises(CheckpointError, match=f"another model: .*{message}"):
        weights_of(paged_forward.load(path), path).check(other, None)


def test_weights_that_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoints.cached("llama")
    weights = weights_of(paged_forward.load(path), path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="GGUF"):
        weights.check(str(tmp_path / "model.gguf"), None)
    with pytest.raises(CheckpointError, match="There is no directory"):
        weights.check(str(tmp_path / "none"), None)
    with pytest.raises(InvalidRequest, match="load_format must be one of auto"):
        weights.check(path, "dummy")
    by_transformers = WeightSource.of(read_facts(path), paged_forward.plan_for(path, by_transformers=True))
    weights = weights_of(paged_forward.load(path), path, source=by_transformers)
    with pytest.raises(CheckpointError, match="transformers"):
        weights.check(path, None)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_after_an_error_in_the_middle_the_old_weights_are_read_again(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, new = (tiny_checkpoints.cached("llama", seed=seed) for seed in (0, 1))
    model = paged_forward.load(before)
    wanted, memory, weights = logits(model), memory_of(model), weights_of(model, before)
    read, count = tensors.TensorFiles.read, 0

    def failing(self: Any, name: str, cut: Any = ()) -> Tensor:
        nonlocal count
        count += str(self.files[0]).startswith(new)
        if count > after:
            raise OSError(5, "Input/output error")
        return read(self, name, cut)

    with monkeypatch.context() as broken:
        broken.setattr(tensors.TensorFiles, "read", failing)
        assert "Input/output error" in weights.load(new, None)["error"]
        count = -1000
        weights.restore()
    assert torch.equal(logits(model), wanted)
    assert memory_of(model) == memory
    assert weights.load(new, None) == {"error": None}
    assert torch.equal(logits(model), logits(paged_forward.load(new)))


def test_old_weights_that_were_overwritten_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    path = write(tmp_path, tensors_of(tiny_checkpoints.cached("llama")), tiny_checkpoints.cached("llama"))
    model = paged_forward.load(path)
    weights = weights_of(model, path)
    file = Path(path) / "model.safetensors"
    save_file(tensors_of(tiny_checkpoints.cached("llama", seed=1)), file)
    assert weights.load(path, None) == {"error": None}
    save_file(tensors_of(tiny_checkpoints.cached("llama", seed=2)), file)
    with pytest.raises(RuntimeError, match="not in"):
        weights.restore()


def test_other_scales_of_a_cache_of_8_bits_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoints.cached("llama")
    model = paged_forward.load(path)
    scale = {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}
    new = write(tmp_path, tensors_of(path) | scale, path)
    with pytest.raises(CheckpointError, match=r"scales of the 8-bit KV cache differ .*layers\.1"):
        weights_of(model, path, scaled_cache=True).check(new, None)
    weights_of(model, path).check(new, None)  # no other cache reads the scales


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("way", ["native", "with_cpp"])
def test_quantized_checkpoints_take_the_place_of_their_like(form: str, way: str, tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        source = Path(tiny_checkpoints.cached("llama", seed=seed, **quantized_checkpoints.SHAPE))
        paths.append(quantized_checkpoints.convert(source, tmp_path / str(seed), form)[0])
    model = paged_forward.load(paths[0], kernels=kernels(way))
    first = logits(model)
    assert weights_of(model, paths[0], kernels=kernels(way)).load(paths[1], None) == {"error": None}
    wanted = logits(paged_forward.load(paths[1], kernels=kernels(way)))
    assert torch.equal(logits(model), wanted)
    assert not torch.equal(wanted, first)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "w4a16"])
def test_a_recorded_graph_computes_with_the_new_weights(quantization: str | None, tied: bool) -> None:
    config: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": tied}
    before, after = (tiny_checkpoints.cached("gemma", seed=seed, **config) for seed in (0, 1))
    own = kernels("with_cpp")
    model = paged_forward.load(before, kernels=own, quantization=quantization)
    graph = CpuGraph(model, paged_forward.pool_for(model, 8, 16), own, 32, 1)
    first = paged_forward.graph_logits(graph, model, prompt(), torch.zeros(1, dtype=torch.int64)).clone()
    weights = weights_of(model, before, kernels=own, quantization=quantization)
    assert weights.load(after, None) == {"error": None}
    found = paged_forward.graph_logits(graph, model, prompt(), torch.zeros(1, dtype=torch.int64))
    fresh = paged_forward.load(after, kernels=own, quantization=quantization)
    again = CpuGraph(fresh, paged_forward.pool_for(fresh, 8, 16), own, 32, 1)
    assert torch.equal(found, paged_forward.graph_logits(again, fresh, prompt(), torch.zeros(1, dtype=torch.int64)))
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
        sampling=Sampling(zero + len(IDS) - 1, zero, greedy=one > 0, uniform=one - 1),
    )
