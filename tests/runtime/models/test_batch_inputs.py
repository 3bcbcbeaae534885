"""Optional inputs of a batch: vectors in place of ids, and positions with three axes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

import paged_forward
import tiny_checkpoints
from runtime.modeling.decoder import Decoder

IDS = list(range(10, 33))
TABLE = np.array([[3, 1, 0]], np.int32)
STEPS = ((0, 9), (9, 22), (22, 23))  # two chunks of the prompt, then one token
SECTIONS = [1, 1, 2]


def in_steps(model: Decoder, **changes: Any) -> torch.Tensor:
    """Return the hidden states [T, E] of IDS. `changes` are fields of the batch for all tokens; each step gets its
    slice.
    """
    pool = paged_forward.pool_for(model, 4, 8)
    found = []
    for start, end in STEPS:
        own = {
            name: value[..., start:end] if name == "position_axes" else value[start:end]
            for name, value in changes.items()
        }
        found.append(model(paged_forward.batch_of([IDS[start:end]], [start], TABLE, pool, **own)))
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_vectors_of_the_embedding_itself_change_nothing(family: str) -> None:
    model = paged_forward.load(tiny_checkpoints.cached(family))
    pool = paged_forward.pool_for(model, 4, 8)
    vectors = model.embed(paged_forward.batch_of([IDS], [0], TABLE, pool))
    wanted, no_id = in_steps(model), torch.full((len(IDS),), -1)
    whole = {"embeds_mask": torch.ones(len(IDS), dtype=torch.bool), "token_ids": no_id}
    assert torch.equal(in_steps(model, input_embeds=vectors, **whole), wanted)
    mask = torch.arange(len(IDS)) % 3 == 0
    some_ids = torch.where(mask, no_id, torch.tensor(IDS))
    mixed = {"embeds_mask": mask, "token_ids": some_ids}
    assert torch.equal(in_steps(model, input_embeds=vectors, **mixed), wanted)
    assert not torch.equal(in_steps(model, input_embeds=vectors + 1, **mixed), wanted)


@cache
def with_sections() -> tuple[str, Qwen2VLTextModel]:
    """Return Qwen2-VL's text model, whose rotary embedding has sections, and an equivalent checkpoint of Qwen 2."""
    path = Path(tiny_checkpoints.write(Path(tiny_checkpoints.cached("qwen2")).parent / "sections", "qwen2"))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
    values = json.loads((path / "config.json").read_text())
    values["rope_parameters"] = rope
    (path / "config.json").write_text(json.dumps(values))
    shape = {**tiny_checkpoints.SHAPE, "vocab_size": 128, "rope_parameters": rope}
    del shape["head_dim"]  # the model uses hidden_size / num_attention_heads, which is the same
    model = Qwen2VLTextModel._from_config(Qwen2VLTextConfig(**shape), attn_implementation="eager").eval()
    tiny_checkpoints.redraw(model, seed=4)
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = torch.randn(128, 32)
    save_file(tensors, path / "model.safetensors")
    return str(path), model


def test_positions_of_three_axes_are_those_of_qwen2_vl() -> None:
    path, theirs = with_sections()
    model = paged_forward.load(path)
    # Text, an image of three rows with four patches each, text. The axes are time, height and width.
    image = torch.stack([torch.zeros(12).long(), torch.arange(12) // 4, torch.arange(12) % 4])
    before, after = torch.arange(5).expand(3, -1), torch.arange(6).expand(3, -1) + 9
    positions = torch.cat([before, image + 5, after], dim=1)
    vectors = torch.randn(len(IDS), 32)
    with torch.no_grad():
        wanted = theirs(inputs_embeds=vectors[None], position_ids=positions[:, None], use_cache=False)
    given = {"input_embeds": vectors, "embeds_mask": torch.ones(len(IDS), dtype=torch.bool)}
    found = in_steps(model, position_axes=positions, **given)
    assert (found - wanted.last_hidden_state[0]).abs().max() < 1e-4
    plain = in_steps(model, **given)
    assert (plain - found).abs().max() > 1e-2


def test_three_equal_axes_are_one() -> None:
    path, _ = with_sections()
    model = paged_forward.load(path)
    positions = torch.arange(len(IDS)).expand(3, -1)
    assert torch.equal(in_steps(model, position_axes=positions), in_steps(model))


def test_a_model_without_sections_refuses_three_axes() -> None:
    model = paged_forward.load(tiny_checkpoints.cached("llama"))
    with pytest.raises(ValueError, match="no sections"):
        in_steps(model, position_axes=torch.arange(len(IDS)).expand(3, -1))
