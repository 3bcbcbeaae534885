"""The arguments of kernels that the attention layer sets in addition to queries, keys and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paged_forward
import tiny_checkpoints
from ops.attention import AttentionMetadata, AttentionOptions, token_positions
from ops.rope import Rotation
from ops.select import select
from runtime.errors import CheckpointError
from runtime.kv_cache.paged import PagedKVCache
from runtime.layers.attention import Attention
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.rope_parameters import RopeParameters
from runtime.layers.sharding import TensorParallelGroup
from runtime.loading.parameters import collect_shards, split

INDEX, SIZE, HEADS, KV_HEADS, DIM = 5, 12, 4, 2, 6
TENSORS = {
    **{f"a.{part}_proj.weight": torch.randn(heads * DIM, SIZE) for part, heads in (("q", 4), ("k", 2), ("v", 2))},
    "a.o_proj.weight": torch.randn(SIZE, HEADS * DIM),
    "a.sinks": torch.linspace(-2, 2, HEADS),
}


class Together:
    """A rank whose all-reduce the test computes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        raise NotImplementedError


def layer(
    sinks: bool,
    group: TensorParallelGroup | None = None,
    kernels: Any = None,
    tensors: Mapping[str, Tensor] = TENSORS,
) -> Attention:
    build = Build(kernels or select(), context_length=32)
    rope = build.rope(RopeParameters(theta=100.0, dim=DIM, max_position=32))
    made = Attention("a", INDEX, SIZE, HEADS, KV_HEADS, DIM, build, rope=rope, sinks=sinks)
    if group is not None:
        split(made, group)
    for name, (shard,) in collect_shards(made).items():
        if name in tensors:
            shard.target.copy_(tensors[name][shard.cut])
    for part in (made, made.kv_scales):
        part.prepare()
    return made


def run(made: Attention, pool_dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(5)
    starts, counts, x = [0, 0], [7, 1], torch.randn(8, SIZE)
    pools = torch.zeros(2, 4, made.num_kv_heads, 4, DIM).to(pool_dtype)
    batch = ForwardBatch(
        token_ids=torch.zeros(8, dtype=torch.int64),
        positions=torch.from_numpy(token_positions(starts, counts)),
        attention=AttentionMetadata.build(starts, counts, np.array([[0, 1], [2, 3]], np.int32), 4),
        cache={INDEX: PagedKVCache(pools[0], pools[1])},
    )
    return made(x, batch)


class Remembered:
    """Another kind of cache: keys and values of one row in plain tensors, which keep only a window."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.k, self.v = torch.empty(2, 0, KV_HEADS, DIM)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def store(self, kernels: Any, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Any) -> None:
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])

    def rotate_store(
        self, kernels: Any, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: ForwardBatch, scales: Any
    ) -> Tensor:
        q, k = kernels.norm_rotate(q, k, rotation)
        self.store(kernels, k, v, batch, scales)
        return q

    def attend(self, kernels: Any, q: Tensor, batch: ForwardBatch, scales: Any, options: AttentionOptions) -> Tensor:
        self.k, self.v = self.k[-self.size :], self.v[-self.size :]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("thd,shd->hts", q, keys) * options.scale
        return torch.einsum("hts,shd->thd", scores.softmax(-1), values)


def test_a_layer_never_knows_the_kind_of_its_cache() -> None:
    made, size = layer(sinks=False), 3
    cache: Any = Remembered(size)  # has no latent vectors
    x = torch.randn(7, SIZE)
    pools = torch.zeros(2, 2, KV_HEADS, 4, DIM)
    windowed = layer(sinks=False)
    windowed.window = size
    for position in range(7):
        values: dict[str, Any] = {
            "token_ids": torch.zeros(1, dtype=torch.int64),
            "positions": torch.tensor([position]),
            "attention": AttentionMetadata.build([position], [1], np.array([[0, 1]], np.int32), 4),
        }
        token = x[position : position + 1]
        found = made(token, ForwardBatch(**values, cache={INDEX: cache}))
        wanted = windowed(token, ForwardBatch(**values, cache={INDEX: PagedKVCache(pools[0], pools[1])}))
        torch.testing.assert_close(found, wanted)


def test_sinks_take_part_in_the_softmax() -> None:
    def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, step: Any, options: AttentionOptions) -> Tensor:
        options = options._replace(sinks=TENSORS["a.sinks"])
        return select().attend(q, k_pool, v_pool, step, options)

    wanted = replace(select(), attend=attend)
    with_sinks, without = run(layer(sinks=True)), run(layer(sinks=False))
    torch.testing.assert_close(with_sinks, run(layer(sinks=False, kernels=wanted)))
    assert (with_sinks - without).abs().max() > 0.1


@pytest.mark.parametrize("size", [2, 4])
def test_sinks_are_cut_with_their_heads(size: int) -> None:
    parts = [run(layer(sinks=True, group=Together(rank, size))) for rank in range(size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), run(layer(sinks=True)), atol=1e-5, rtol=1e-5)


def test_scales_of_an_fp8_cache_reach_store_and_attend() -> None:
    seen: list[dict[str, Any]] = []
    plain = select()

    def rotate_store(*args: Any, **options: Any) -> Tensor:
        seen.append(options)
        return plain.rotate_store(*args, **options)

    def attend(*step: Any) -> Tensor:
        options = step[-1]
        seen.append({"k_scale": options.k_scale, "v_scale": options.v_scale})
        return plain.attend(*step)

    scales = {"a.k_scale": torch.tensor([0.5]), "a.v_scale": torch.tensor([2.0])}
    made = layer(
        sinks=False, kernels=replace(plain, rotate_store=rotate_store, attend=attend), tensors=TENSORS | scales
    )
    exact, rounded = run(made), run(made, torch.float8_e4m3fn)
    given = {"k_scale": 0.5, "v_scale": 2.0}
    assert seen == [{}, {"k_scale": 1.0, "v_scale": 1.0}, given, given]
    assert 0 < (exact - rounded).abs().max() < 0.2 * exact.abs().max()


def scales_file(factors: dict[str, Any], model_type: str = "llama", dtype: str = "float8_e4m3fn") -> str:
    cache = {"dtype": dtype, "scaling_factor": factors}
    return json.dumps({"model_type": model_type, "kv_cache": cache})


def test_scales_come_from_the_checkpoint_or_are_one(tmp_path: Path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(0.25)
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([4.0])
    save_file(tensors, tmp_path / "model.safetensors")
    layers: Any = paged_forward.load(path).layers
    assert layers[0].attention.kv_scales.values == {"k_scale": 1.0, "v_scale": 1.0}
    assert layers[1].attention.kv_scales.values == {"k_scale": 0.25, "v_scale": 4.0}
    dummy: Any = paged_forward.load(path, load_format="dummy").layers
    assert dummy[1].attention.kv_scales.values == {"k_scale": 1.0, "v_scale": 1.0}
    scales = {"0": {str(number): 0.5 + number for number in range(len(layers))}}
    file = tmp_path / "scales.json"
    file.write_text(scales_file(scales))
    layers = paged_forward.load(path, kv_scales=str(file)).layers
    assert [layer.attention.kv_scales.values["v_scale"] for layer in layers] == [*scales["0"].values()]
    for content, reason in (
        (scales_file({"0": {"0": 0.5}}), "rank 0, layer 1 must be a positive number, not None"),
        (scales_file({"0": {"0": 0.5, "1": True}}), "layer 1 must be a positive number, not True"),
        (scales_file(scales | {"1": {}}), "has scales of the ranks 0, 1, but --tp-size is 1"),
        (scales_file(scales, model_type="qwen3"), "is for qwen3 models"),
        (scales_file(scales, dtype="float8_e5m2"), "must be float8_e4m3fn"),
        ("[" * 9, "cannot be read"),
        ("[]", "has no kv_cache"),
    ):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=reason):
            paged_forward.load(path, kv_scales=str(file))
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(0.0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_scale must be a positive number"):
        paged_forward.load(path)
