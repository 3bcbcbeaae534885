from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file

import paged_forward
import tiny_checkpoints
from ops.select import select
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.linear import Linear
from runtime.layers.sharding import ShardRange
from runtime.layers.weight import Shard, SubLayer
from runtime.loading.parameters import collect_shards, fill_dummy

IDS = list(range(10, 40))


def logits(model) -> torch.Tensor:
    return paged_forward.all_logits(model, [IDS], page_size=4)[0]


def edited(tmp_path: Path, change) -> str:
    """Return a Llama checkpoint whose tensors `change` has edited in place."""
    path = tiny_checkpoints.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return path


def test_missing_extra_and_misshapen_tensors_are_all_named_at_once(tmp_path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.norm.weight"] = torch.zeros(31)

    with pytest.raises(CheckpointError) as error:
        paged_forward.load(edited(tmp_path, change))
    message = str(error.value)
    assert "1 missing (model.layers.1.self_attn.k_proj.weight)" in message
    assert "1 not of this model (model.layers.0.self_attn.q_proj.bias)" in message
    assert "1 of the wrong shape (model.norm.weight is 31, must be 32)" in message


def test_misfit_is_found_before_any_memory_is_taken() -> None:
    huge = {"vocab_size": 2**31 - 1, "hidden_size": 2**20}
    with pytest.raises(CheckpointError, match="model.embed_tokens.weight is 128x32, must be 2147483647x1048576"):
        paged_forward.load(tiny_checkpoints.cached(), huge)


def test_long_lists_of_tensors_are_cut(tmp_path) -> None:
    path = edited(tmp_path, lambda t: t.update({f"extra.{i}": torch.zeros(1) for i in range(50)}))
    with pytest.raises(CheckpointError, match="50 not of this model .* and 30 more") as error:
        paged_forward.load(path)
    assert len(str(error.value)) < 2000


def test_what_nobody_needs_is_ignored(tmp_path) -> None:
    path = edited(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(paged_forward.load(path)), logits(paged_forward.load(tiny_checkpoints.cached())))


def test_copy_of_a_tied_head_is_ignored_but_needed_when_not_tied(tmp_path) -> None:
    path = edited(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    tied, untied = paged_forward.load(path, {"tie_word_embeddings": True}), paged_forward.load(path)
    assert tied.head is not None
    assert tied.head.weight is None
    assert torch.equal(logits(tied), logits(untied))
    path = edited(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="missing .lm_head.weight"):
        paged_forward.load(path)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_seeing", "glm4_moe"])
def test_experts_load_from_one_tensor_as_from_one_each(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoints.write(tmp_path, family)
    expected = logits(paged_forward.load(path))
    tensors = load_file(tmp_path / "model.safetensors")
    gates = [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]
    for gate in gates:
        prefix = gate.removesuffix("0.gate_proj.weight")
        number = sum(name.startswith(prefix) for name in tensors) // 3
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{index}.{part}.weight") for index in range(number)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]
    assert gates
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits(paged_forward.load(path)), expected)


def test_torch_files_load_the_same_model(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    expected = logits(paged_forward.load(path))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(logits(paged_forward.load(path, load_format="pt")), expected)
    assert torch.equal(logits(paged_forward.load(path, mmap=False)), expected)


def test_torch_files_of_old_versions_load(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "model.safetensors").unlink()
    loaded = paged_forward.embedded(paged_forward.load(path))
    assert torch.equal(loaded, tensors["model.embed_tokens.weight"])


def test_torch_file_that_would_run_code_is_refused(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        paged_forward.load(path)


@pytest.mark.parametrize("num_load_threads", [1, 3])
@pytest.mark.parametrize("mmap", [True, False])
def test_shards_load_the_same_model(tmp_path, mmap, num_load_threads) -> None:
    path = tiny_checkpoints.write(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sharded = paged_forward.load(path, mmap=mmap, num_load_threads=num_load_threads)
    assert torch.equal(logits(sharded), logits(paged_forward.load(tiny_checkpoints.cached())))


def test_missing_shard_is_named(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        paged_forward.load(path)


def test_tensor_in_two_files_is_named(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "again.safetensors")
    with pytest.raises(CheckpointError, match="two weight files"):
        paged_forward.load(path)


def test_cut_off_file_is_named(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut off"):
        paged_forward.load(path)


def test_dummy_weights_need_no_files_and_are_always_the_same(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first = paged_forward.load(path, load_format="dummy")
    second = paged_forward.load(path, load_format="dummy", random_seed=7)
    weights = first.state_dict()
    assert all(torch.equal(weights[name], other) for name, other in second.state_dict().items())
    for name in ("embedding.weight", "layers.0.mlp.down.weight", "layers.2.mlp_norm.weight"):
        assert 5e-4 < weights[name].abs().max() <= 1e-3
    assert not torch.equal(weights["layers.0.mlp.down.weight"], weights["layers.1.mlp.down.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_draws_its_cut_of_the_whole_dummy_tensor(dtype: torch.dtype) -> None:
    whole = torch.nn.Parameter(torch.empty(12, 7, dtype=dtype), requires_grad=False)
    share = torch.nn.Parameter(torch.empty(4, 7, dtype=dtype), requires_grad=False)
    fill_dummy(Shard("w", whole, 0, 12, (None, None)))
    fill_dummy(Shard("w", share, 0, 4, (None, None), (ShardRange(8, 4, 12), ShardRange(0, 7, 7))))
    assert torch.equal(share, whole[8:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_take_the_planned_dtype_and_compute_about_the_same(dtype) -> None:
    path = tiny_checkpoints.cached("qwen3")
    model = paged_forward.load(path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    exact, rounded = logits(paged_forward.load(path)), logits(model)
    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rounded).min() > 0.99


def test_bfloat16_checkpoint_loads_exactly(tmp_path) -> None:
    path = tiny_checkpoints.write(tmp_path, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for mmap in (True, False):
        assert torch.equal(paged_forward.embedded(paged_forward.load(path, dtype="bfloat16", mmap=mmap)), stored)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_loaded_model_asks_for_no_gradients_and_is_in_eval_mode() -> None:
    model = paged_forward.load(tiny_checkpoints.cached())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_layer_whose_pieces_leave_a_gap_is_our_mistake() -> None:
    class Gap(Linear):
        def shards(self):
            yield next(super().shards())

    with pytest.raises(RuntimeError, match="4 of 6 rows"):
        collect_shards(Gap(3, [SubLayer("a", 4), SubLayer("b", 2)], Build(select())))


def test_layers_that_claim_the_same_tensor_are_our_mistake() -> None:
    twins = torch.nn.ModuleList([Linear(3, [SubLayer("a", 4)], Build(select())) for _ in range(2)])
    with pytest.raises(RuntimeError, match=r"a\.weight"):
        collect_shards(twins)


def test_each_weight_is_prepared_once_complete_and_the_plain_one_let_go() -> None:
    plain = []

    def prepare(weight: torch.Tensor) -> torch.Tensor:
        assert weight.abs().sum() > 0
        plain.append(ref(weight))
        return weight.clone()

    model = paged_forward.load(tiny_checkpoints.cached(), kernels=replace(select(), prepare=prepare))
    assert len(plain) == 4 * len(model.layers) + 1
    assert all(weight() is None for weight in plain)
    torch.testing.assert_close(logits(model), logits(paged_forward.load(tiny_checkpoints.cached())))


def test_a_head_of_its_own_is_used_whatever_is_said_of_tying(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers 5: with a word."""
    path, ids = tiny_checkpoints.write(tmp_path), list(range(3, 30))
    wanted = tiny_checkpoints.reference(path, ids)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    assert torch.equal(tiny_checkpoints.reference(path, ids), wanted)
    [found] = paged_forward.all_logits(paged_forward.load(path), [ids], 4)
    assert (found - wanted).abs().max() < 1e-4
    assert "lm_head.weight differs from the embedding" in caplog.text
    caplog.clear()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    [found] = paged_forward.all_logits(paged_forward.load(path), [ids], 4)
    assert (found - tiny_checkpoints.reference(path, ids)).abs().max() < 1e-4
    assert "lm_head" not in caplog.text
