"""ALiBi, where scores decrease with distance: the slopes, and Baichuan 13B, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import cpp_kernels
import paged_forward
import tiny_checkpoints
from ops.select import select
from runtime.errors import CheckpointError
from runtime.layers.attention import alibi_slopes
from runtime.modeling.decoder import Decoder

SEQUENCES = [list(range(3, 3 + length)) for length in (41, 23, 100)]
THRESHOLD = 1e-4


@pytest.mark.parametrize("num_heads", [1, 2, 4, 6, 12, 40, 64, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    ones = torch.ones(1, 2, dtype=torch.int64)
    wanted = build_alibi_tensor(ones, num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), wanted)
    for steepest in (8, 4):
        wanted = -build_mpt_alibi_tensor(num_heads, 2, steepest)[:, 0, 0]
        found = torch.tensor(alibi_slopes(num_heads, steepest))
        torch.testing.assert_close(found.sort()[0], wanted.sort()[0])


def larger_baichuan(folder: Path) -> str:
    """Write a checkpoint like the published 13B models: without `max_position_embeddings`, with the class of Baichuan
    2.
    """
    path = tiny_checkpoints.write(folder, "baichuan", head_dim=16, hidden_size=64)
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    del values["max_position_embeddings"]
    values |= {"architectures": ["BaichuanForCausalLM"], "model_max_length": 256}
    file.write_text(json.dumps(values), encoding="utf-8")
    return path


def by_transformers(path: str, ids: list[int]) -> torch.Tensor:
    """Return the logits of an equivalent Llama with all tokens at position 0 and Bloom's slopes in its mask."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoints.readable(path), dtype=torch.float32, attn_implementation="eager"
    )
    size = len(ids)
    mask = torch.full((size, size), -torch.inf).triu(1)
    lost = build_alibi_tensor(torch.ones(1, size, dtype=torch.int64), 4, torch.float32)
    zeros = torch.zeros(1, size, dtype=torch.int64)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([ids]),
            position_ids=zeros,
            attention_mask=(mask + lost)[None],
            use_cache=False,
        ).logits[0]


def largest_error(path: str, model: Decoder, page_size: int) -> float:
    found = paged_forward.all_logits(model, SEQUENCES, page_size)
    wanted = [by_transformers(path, ids) for ids in SEQUENCES]
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kernels", ["torch", "C++"])
def test_baichuan_of_13b_equals_transformers(kernels: str, page_size: int, tmp_path: Path) -> None:
    path = larger_baichuan(tmp_path)
    choices = cpp_kernels.CHOICES if kernels == "C++" else None
    model = paged_forward.load(path, kernels=select(choices))
    assert largest_error(path, model, page_size) < THRESHOLD
    for layer in model.layers:
        attention: Any = layer.get_submodule("attention")
        attention.slopes = attention.slopes.flip(0)
    assert largest_error(path, model, page_size) > THRESHOLD


@pytest.mark.parametrize(
    ("family", "values", "named"),
    [
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(family: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"{named}.*--model-impl transformers"):
        paged_forward.load(tiny_checkpoints.cached(family), values)
