"""NVFP4 checkpoints with scales of the inputs, for kernels that round inputs (fakes of FlashInfer's)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paged_forward
import quantized_checkpoints
import recorded_flashinfer
import tiny_checkpoints
from ops.matmul import nvfp4
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.grouped import GroupedWeight
from ops.moe import GroupedMixture, Mixture, native
from ops.select import Kernels, select
from runtime.errors import CheckpointError
from runtime.layers.moe import mixtures
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.loading.staged_weights import StagedWeights
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo

IDS = torch.randint(3, 128, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
MLP, ATTENTION = "model.layers.0.mlp.experts", "model.layers.0.self_attn"


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def kernels(file: str = "with_trtllm_gen") -> Kernels:
    return replace(select({"matmul": "with_fp4", "moe": file}), route=native.route)  # routing needs no Triton here


def loaded(path: str, given: Kernels, group: Any = None) -> Any:
    return load_model(read_facts(path), paged_forward.plan_for(path, dtype="bfloat16"), given, group)


@pytest.mark.parametrize(
    ("file", "form", "options"),
    [
        ("with_flashinfer", "modelopt", {"kind": "nvfp4"}),
        ("with_trtllm_gen", "compressed-tensors", {"preset": "NVFP4"}),
    ],
)
def test_kernels_get_the_scales_of_inputs(file: str, form: str, options: dict[str, Any], tmp_path: Path) -> None:
    quantized, _ = quantized_checkpoints.write(tmp_path, form, "qwen3_moe", **options)
    stored = load_file(Path(quantized) / "model.safetensors")

    def scale(name: str) -> torch.Tensor:
        found = stored.get(f"{name}.input_scale")
        return (1 / stored[f"{name}.input_global_scale"] if found is None else found).reshape(())

    used, weights_read, mixtures_read = kernels(file), [], []

    def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
        weights_read.append(weight)
        return used.prepare_grouped(weight, dtype)

    def prepare_grouped_experts(mixture: GroupedMixture, dtype: torch.dtype) -> Mixture:
        mixtures_read.append(mixture)
        return used.prepare_grouped_experts(mixture, dtype)

    given = replace(used, prepare_grouped=prepare_grouped, prepare_grouped_experts=prepare_grouped_experts)
    model = loaded(quantized, given)
    layer = model.layers[0]
    assert all(isinstance(each.weight, FusedWeight) for each in (layer.attention.qkv, layer.attention.out))
    largest = max(scale(f"{ATTENTION}.{each}_proj") for each in "qkv")
    torch.testing.assert_close(layer.attention.qkv.weight.parts[2], (1 / largest)[None])
    first, second = (each.parts for each in (layer.mlp.gate_up, layer.mlp.down))
    numbers = range(model.layers[0].mlp.num_experts)
    gates = max(scale(f"{MLP}.{number}.{each}_proj") for number in numbers for each in ("gate", "up"))
    torch.testing.assert_close(first[2], (1 / gates)[None])
    downs = torch.stack([scale(f"{MLP}.{number}.down_proj") for number in numbers])
    torch.testing.assert_close(second[2], 1 / downs)
    # The same layers by the reference, which rounds inputs in torch.
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    weights, experts = native.route(torch.randn(9, len(downs)), 2, renormalise=True)
    found = used.mix(x, layer.mlp.weights, weights, experts, "silu").float()
    wanted = native.mix_rounded(x.float(), mixtures_read[0], weights, experts)
    assert (found - wanted).norm() / wanted.norm() < 0.02
    product = layer.attention.qkv.method.multiply(layer.attention.qkv, x, None, used)
    torch.testing.assert_close(product, nvfp4.linear(x, weights_read[0]), rtol=2e-2, atol=2e-3)
    outputs = paged_forward.all_logits(model, IDS, 16)
    assert all(bool(each.isfinite().all()) for each in outputs)


def test_ranks_share_the_scales_of_inputs(tmp_path: Path) -> None:
    quantized, _ = quantized_checkpoints.write(tmp_path, "modelopt", "qwen3_moe", kind="nvfp4")
    x, batch, given = torch.randn(9, 64).bfloat16(), None, kernels()
    whole = mixtures(loaded(quantized, given))[0](x, batch)
    total = torch.zeros(9, 64)
    for number in range(2):
        mesh = Mesh(RankInfo(rank=number, tp_size=2), torch.device("cpu"))
        part: Any = mixtures(loaded(quantized, given, mesh.axis("tp")))[0]
        assert isinstance(part.down, FusedWeight)
        part._summed_over = None
        total += part(x, batch).float()
    torch.testing.assert_close(total, whole.float(), rtol=0, atol=0.02 * whole.abs().max().item())


def test_new_weights_bring_new_scales_of_inputs(tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        source = Path(tiny_checkpoints.cached("qwen3_moe", seed=seed, **quantized_checkpoints.MOE_SHAPE))
        paths.append(quantized_checkpoints.convert(source, tmp_path / str(seed), "modelopt", kind="nvfp4")[0])
    old, new = (loaded(path, kernels()) for path in paths)
    facts, plan = read_facts(paths[0]), paged_forward.plan_for(paths[0], dtype="bfloat16")
    staged = StagedWeights(old, facts, plan, fixed=True, scaled_cache=False)
    tensors = load_file(Path(paths[1]) / "model.safetensors")
    later = {name: tensors.pop(name) for name in list(tensors) if name.endswith("input_scale")}
    assert staged.stage(tensors, merge=True, final=False).waiting
    found = staged.stage(later, merge=True, final=True)
    assert (found.unknown, found.waiting) == ([], [])
    staged.commit()
    for (name, ours), (_, theirs) in zip(old.named_parameters(), new.named_parameters(), strict=True):
        pairs = zip(getattr(ours, "parts", (ours,)), getattr(theirs, "parts", (theirs,)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


@pytest.mark.parametrize("change", ["missing", "zero"])
def test_experts_without_scales_of_inputs_are_refused(change: str, tmp_path: Path) -> None:
    quantized, _ = quantized_checkpoints.write(tmp_path, "modelopt", "qwen3_moe", kind="nvfp4")
    file, name = Path(quantized) / "model.safetensors", f"{MLP}.1.up_proj.input_scale"
    stored = load_file(file)
    if change == "zero":
        stored[name] = torch.zeros(())
        save_file(stored, file)
        with pytest.raises(CheckpointError, match=f"{name} must be a positive number, not 0"):
            loaded(quantized, kernels())
        return
    del stored[name]
    save_file(stored, file)
    with pytest.raises(ValueError, match="with scales of the inputs"):
        loaded(quantized, kernels())
    triton = replace(select({"matmul": "with_fp4"}))  # only the experts need all scales
    assert isinstance(loaded(quantized, triton).layers[0].attention.qkv.weight, FusedWeight)
