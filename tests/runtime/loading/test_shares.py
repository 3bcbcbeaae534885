"""The shards of all ranks and stages form the whole checkpoint, and no rank reads more than its shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paged_forward
import tiny_checkpoints
from ops.matmul import with_onednn
from ops.select import select
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.loading.parameters import collect_shards
from runtime.loading.tensors import TensorFiles
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder


def load(path: str, rank_info: RankInfo, *, mmap: bool = True, matmul: str = "native") -> Decoder:
    facts = read_facts(path)
    plan, axis = paged_forward.plan_for(path, mmap=mmap), Mesh(rank_info, torch.device("cpu")).axis("tp")
    return load_model(facts, plan, select({"matmul": matmul}), axis, rank_info.stage_layers(facts.num_layers))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen2"])
def test_shares_are_slices_of_the_checkpoint_and_cover_it(family: str, tp_size: int, pp_size: int, mmap: bool):
    path = tiny_checkpoints.cached(family, vocab_size=131)
    tensors = load_file(Path(path) / "model.safetensors")
    covered = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in tensors.items()}
    for rank in range(tp_size * pp_size):
        model = load(path, RankInfo(rank=rank, tp_size=tp_size, pp_size=pp_size), mmap=mmap)
        for name, shards in collect_shards(model).items():
            for shard in shards:
                if name in tensors:  # optional tensors have a default
                    assert torch.equal(shard.target, tensors[name][shard.cut])
                    covered[name][shard.cut] = True
    assert all(each.all() for each in covered.values())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_rank_reads_no_more_than_its_share(family: str, monkeypatch: pytest.MonkeyPatch):
    path = tiny_checkpoints.cached(family)
    read = 0
    original = TensorFiles.read_all

    def counting(self, take, cuts, num_threads=1):
        def count(name, number, part):
            nonlocal read
            read += part.numel()
            take(name, number, part)

        original(self, count, cuts, num_threads)

    monkeypatch.setattr(TensorFiles, "read_all", counting)
    model = load(path, RankInfo(rank=1, tp_size=2))
    assert read == sum(parameter.numel() for parameter in model.parameters())
    whole = sum(tensor.numel() for tensor in load_file(Path(path) / "model.safetensors").values())
    assert read < 0.55 * whole


@pytest.mark.skipif(not with_onednn.packs(torch.float32), reason="oneDNN packs no weights here")
@pytest.mark.parametrize(
    "rank_info",
    [RankInfo(rank=1, tp_size=2), RankInfo(rank=1, pp_size=2), RankInfo(rank=0, tp_size=2, pp_size=2)],
)
def test_packed_weights_of_a_rank_are_its_share_and_counted_as_such(rank_info: RankInfo):
    path = tiny_checkpoints.cached("llama")
    plain, packed = (load(path, rank_info, matmul=matmul) for matmul in ("native", "with_onednn"))
    before, after = (dict(model.named_parameters()) for model in (plain, packed))
    assert after.keys() == before.keys()
    for name, parameter in after.items():
        assert (parameter.shape, parameter.nbytes) == (before[name].shape, before[name].nbytes)
    assert {name for name, parameter in after.items() if parameter.is_mkldnn} == {
        name for name, parameter in after.items() if parameter.dim() == 2 and not name.startswith("embedding")
    }
